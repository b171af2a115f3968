"""What a server says of its start."""

import gc
import subprocess
import sys
import time

import jax.monitoring
import pytest

from jaxspec.commands.serve.start_up import FOUND, MISSED, StartUp
from jaxspec.commands.shared.collector import without_collector


def test_parts_of_a_start_are_added_up():
    start_up = StartUp(time.perf_counter() - 2)
    for name, seconds in (("loading", 0.1), ("compiling", 0.05), ("loading", 0.1)):
        with start_up.part(name):
            time.sleep(seconds)
    assert list(start_up.seconds) == ["importing", "loading", "compiling"]
    assert start_up.seconds["importing"] == pytest.approx(2, abs=0.1)
    assert start_up.seconds["loading"] >= 0.2 and start_up.seconds["compiling"] >= 0.05
    parts = start_up.line().split(": ")
    assert parts[0].startswith("ready after 2.") and parts[1].startswith("importing 2.0, loading ")
    assert "stored" not in parts[1]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([FOUND, FOUND], "all programs were found stored"),
        ([FOUND, MISSED], "1 of 2 programs were found stored"),
    ],
)
def test_stored_programs_are_counted(events: list[str], said: str):
    start_up = StartUp(time.perf_counter())
    with start_up.counting_stored_programs():
        for event in (*events, "/jax/another_event"):
            jax.monitoring.record_event(event)
    jax.monitoring.record_event(MISSED)  # afterwards
    assert start_up.line().endswith(f" ({said})")


def test_the_collector_goes_on_after_an_error():
    with pytest.raises(ValueError, match="while it loads"), without_collector():
        with without_collector():
            pass
        assert not gc.isenabled()
        raise ValueError("while it loads")
    assert gc.isenabled()


def test_generate_imports_what_it_needs():
    code = (
        "import sys, jaxspec.commands.generate.generation; "
        "print({'orbax', 'transformers', 'flax', 'fastapi', 'torch'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
