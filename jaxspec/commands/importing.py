"""Commands, imported when they are asked for. Importing jax takes a second."""

import contextlib
import importlib
import os
import signal
from collections.abc import Iterator
from types import ModuleType

INTERRUPTED = 130  # the exit status of what SIGINT ended, by convention


def import_command(module: str, program: str) -> ModuleType:
    """A module. Ctrl-C meanwhile ends the process in one line, which names the program."""
    with _ended_by_ctrl_c(program):
        return importlib.import_module(module)


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
