"""Commands, imported when they are asked for. Importing jax takes a second."""

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType

from jaxspec.commands.shared.collector import without_collector

STARTED = time.perf_counter()  # of the process, but for what Python itself takes
INTERRUPTED = 130  # the exit status of what SIGINT ended, by convention
# Packages that a plain installation lacks, and the extra that has them.
EXTRAS: Mapping[str, str] = MappingProxyType(
    {"matplotlib": "train", "optax": "train", "fastapi": "serve", "prometheus_client": "serve"}
    | {"opentelemetry": "otel", "opentelemetry.exporter": "otel", "opentelemetry.sdk": "otel"}
    | {"pydantic": "serve", "starlette": "serve", "uvicorn": "serve"}
)


class MissingExtra(ValueError):
    """A package of an extra is not installed; the message says how to get it."""


def import_command(module: str, program: str) -> ModuleType:
    """A module. Ctrl-C meanwhile ends the process in one line, which names the program.

    Raises MissingExtra if it needs a package of an extra.
    """
    try:
        with _ended_by_ctrl_c(program), without_collector():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        message = f"{error.name} is not installed: pip install 'jaxspec-decoding[{extra}]'"
        raise MissingExtra(message) from error


@contextlib.contextmanager
def _ended_by_ctrl_c(program: str) -> Iterator[None]:
    """End the process at once. A KeyboardInterrupt would not do: extension modules turn what is
    raised while they load into errors of their own. There is nothing yet to be put in order."""

    def end(*_: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # who calls us has a way of their own, or SIGINT is ignored, as after `nohup`
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
