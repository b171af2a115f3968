"""Several processes that share a model: the tokens of one process, and ends that are not hangs."""

import argparse
import functools
import json
import pickle
import signal
import subprocess
import time
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxspec.commands import generate
from jaxspec.commands.shared.several_processes import process_group
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.several_processes import FollowingPrograms, LeadingPrograms
from jaxspec.parallel.processes import Processes, ProcessGroup
from tests.helpers.engines import CHAIN, CROWDED, seal
from tests.helpers.marks import slow
from tests.helpers.process_worker import PROMPTS, SAMPLING, new_engine, tokens
from tests.helpers.random_models import make_params
from tests.helpers.several_processes import free_port, started

SECONDS_TO_END = 30
TALKATIVE = """
import sys
from jaxspec.parallel.processes import Processes, ProcessGroup

with Processes(ProcessGroup(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))) as processes:
    processes.claim()
    print("[[]]", flush=True)
    while True:
        if processes.leads:
            processes.tell(bytes(100_000))
        else:
            processes.next()
"""


def workers(size: int, texts: int, requests: int = 2) -> list[list[str]]:
    port = free_port()
    return [
        ["-m", "tests.helpers.process_worker", *map(str, (port, size, index, texts, requests))]
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
    """Of an engine whose programs are those of test_engine.py."""
    processes = cast(Processes, Told())
    params, make = make_params("eagle3", CHAIN), functools.partial(LeadingPrograms, processes)
    config = EngineConfig(max_rows=3, rounds_per_call=4, preemption="swap")
    leader = seal(Engine(params, CROWDED, config, make_programs=make))
    tokens(leader, 1)
    programs = leader.programs
    follower = FollowingPrograms(processes, programs.params, programs.sizes, 100)
    follower.follow()
    jax.tree.map(np.testing.assert_array_equal, follower.state, programs.state)
    leader.forget_texts()
    running = leader.add(PROMPTS[0], SAMPLING[0])
    with pytest.raises(ValueError, match="cannot replace their weights"):
        leader.use_target(leader.params.target, in_flight="restart")
    assert not running.done and leader.weights.pending is None
    leader.finish([running])
    assert running.finish_reason == "length"


@pytest.mark.parametrize(("size", "requests"), [slow(2, 1), slow(2, 2), slow(4, 2)])
def test_processes_generate_what_one_generates(size: int, requests: int):
    with started(workers(size, 1, requests)) as processes:
        expected = tokens(new_engine(), requests)
        outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * size, outputs
    [line] = [line for line in outputs[0][0].splitlines() if line.startswith("[[")]
    assert json.loads(line) == expected
    assert all(len(own) == 12 for own in expected)


def ends(commands: list[list[str]], victim: int, how: signal.Signals) -> list[tuple[int, str]]:
    """Status and stderr of the other processes after a signal to one. They end in time."""
    with started(commands) as processes:
        json_line(processes[0])
        rest = [process for index, process in enumerate(processes) if index != victim]
        began = time.monotonic()
        processes[victim].send_signal(how)
        for process in rest:
            process.wait(timeout=SECONDS_TO_END - (time.monotonic() - began))
        processes[victim].kill()
        return [(process.returncode, process.communicate()[1]) for process in rest]


def lost(victim: int, size: int) -> str:
    return f"jaxspec: process {victim} of {size} has died or cannot be reached: all processes end\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how"), [(3, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_when_a_process_dies_or_is_silent_all_end_with_one_line(victim: int, how: signal.Signals):
    assert ends(workers(4, texts=0), victim, how) == [(1, lost(victim, 4))] * 3


@pytest.mark.slow
def test_when_process_0_dies_all_end():
    for status, error in ends(workers(4, texts=0), 0, signal.SIGKILL):
        assert status != 0
        # jax in the others may see it first, and ends them.
        assert error == lost(0, 4) or "JAX distributed service detected fatal errors" in error


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_process_0_ends_while_it_tells_one_that_is_gone(how: signal.Signals):
    port = str(free_port())
    commands = [["-c", TALKATIVE, port, index] for index in "01"]
    assert ends(commands, 1, how) == [(1, lost(1, 2))]


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
