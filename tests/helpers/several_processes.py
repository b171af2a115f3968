"""Python processes that are started, read and ended."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("localhost", 0))
        return own.getsockname()[1]


@contextlib.contextmanager
def started(commands: list[list[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Python processes with their output as text. They are killed at the end."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes
