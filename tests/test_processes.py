"""Several processes that share a model: the tokens of one process, and ends that are not hangs."""

import argparse
import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxspec.commands import generate
from jaxspec.commands.several_processes import process_group
from jaxspec.processes import Processes, ProcessGroup
from jaxspec.shared_programs import FollowingPrograms, LeadingPrograms
from tests.marks import slow
from tests.process_worker import new_engine, tokens

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
SECONDS_TO_END = 30


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


def workers(size: int, texts: int, requests: int = 2) -> list[list[str]]:
    port = free_port()
    return [
        ["-m", "tests.process_worker", *map(str, (port, size, index, texts, requests))]
        for index in range(size)
    ]


def json_line(process: subprocess.Popen[str]) -> list[list[int]]:
    """The next one; gloo writes lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[["):
            return json.loads(line)
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


class Told:
    """Stands for Processes, in one process: what the leader tells is kept, pickled."""

    def __init__(self):
        self.messages: list[bytes] = []

    def claim(self) -> None: ...

    def tell(self, message: Any) -> None:
        self.messages.append(pickle.dumps(message))

    def next(self) -> Any:
        return pickle.loads(self.messages.pop(0)) if self.messages else None


def test_a_follower_that_is_told_everything_has_the_state_of_the_leader():
    processes = cast(Processes, Told())
    leader = new_engine(make=functools.partial(LeadingPrograms, processes))
    tokens(leader, 1)
    programs = leader.programs
    follower = FollowingPrograms(processes, programs.params, programs.sizes, 100)
    follower.follow()
    jax.tree.map(np.testing.assert_array_equal, follower.state, programs.state)


@pytest.mark.parametrize(("size", "requests"), [slow(2, 1), slow(2, 2), slow(4, 2)])
def test_processes_generate_what_one_generates(size: int, requests: int):
    with started(workers(size, 1, requests)) as processes:
        expected = tokens(new_engine(), requests)
        outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * size, outputs
    [line] = [line for line in outputs[0][0].splitlines() if line.startswith("[[")]
    assert json.loads(line) == expected
    assert all(len(own) == 12 for own in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how"), [(3, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_when_a_process_dies_all_end(victim: int, how: signal.Signals):
    with started(workers(4, texts=0)) as processes:
        json_line(processes[0])
        began = time.monotonic()
        processes[victim].send_signal(how)
        rest = [process for index, process in enumerate(processes) if index != victim]
        for process in rest:
            process.wait(timeout=SECONDS_TO_END)
        assert time.monotonic() - began < SECONDS_TO_END
        processes[victim].kill()
        errors = [process.communicate()[1] for process in rest]
    assert all(process.returncode for process in rest), errors
    message = f"jaxspec: process {victim} of 4 has died or cannot be reached: all processes end"
    assert sum(message in error for error in errors) >= (1 if victim else 0), errors


@pytest.mark.slow
def test_generate_in_two_processes():
    command = ["-m", "jaxspec", "generate", "--max-tokens", "24", "--json"]
    port = free_port()
    command_of_two = [*command, "--tp", "2", "--coordinator", f"localhost:{port}"]
    both = [
        [*command_of_two, "--num-processes", "2", "--process-id", str(index)] for index in (0, 1)
    ]
    with started([*both, [*command, "--no-compilation-cache"]]) as processes:
        outputs = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    first, _, alone = (output for output, _ in outputs)
    found, expected = (json.loads(text.splitlines()[-1]) for text in (first, alone))
    assert found["token_ids"] == expected["token_ids"]


def parsed(*options: str) -> argparse.Namespace:
    return generate.make_parser().parse_args(options)


def test_the_processes_that_options_and_slurm_name():
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
    one = ["--coordinator", "node1:5000"]
    assert process_group(parsed(*one), slurm) == ProcessGroup("node1:5000", 4, 3)
    explicit = [*one, "--num-processes", "2", "--process-id", "0", "--local-devices", "2,3"]
    expected = ProcessGroup("node1:5000", 2, 0, (2, 3))
    assert process_group(parsed(*explicit), slurm) == expected
    assert process_group(parsed(), slurm) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--process-id", "0"], "add --coordinator"),
        (["--coordinator", "a:1"], r"needs --num-processes, or \$SLURM_NTASKS"),
        (["--coordinator", "a", "--num-processes", "2", "--process-id", "0"], "HOST:PORT"),
        (["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"], "no number 2"),
        (["--coordinator", "a:1", "--dp", "2"], "--dp goes without --coordinator"),
        (["--coordinator", "a:1", "--sp", "2"], "--sp goes without --coordinator"),
    ],
)
def test_options_that_make_no_processes(options: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        process_group(parsed(*options), {})


def test_what_several_processes_do_not_do(capsys: pytest.CaptureFixture[str]):
    several = ["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "0"]
    assert generate.main([*several, "--compare"]) == 2
    assert generate.main([*several, "--compilation-cache", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "--compare needs two engines" in lines[0]
    assert "--compilation-cache goes without --coordinator" in lines[1]
