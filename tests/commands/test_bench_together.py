"""The command ``jaxspec bench together``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.commands.bench.together import main


@pytest.mark.slow
def test_its_json_has_the_engines_and_the_folder_of_programs(tmp_path: Path):
    small = ["--requests", "2", "--calls", "3", "--alone", "1", "--new-tokens", "8"]
    command = [sys.executable, "-m", "jaxspec", "bench", "together", *small, "--json"]
    run = [*command, "--compilation-cache", str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    parts = [json.loads(line) for line in done.stdout.splitlines()]
    names = [each["name"] for part in parts for each in part["engines"]]
    assert names == ["plain", "default", "fixed"]
    assert {part["arguments"]["compilation_cache"] for part in parts} == {str(tmp_path)}
    assert any(tmp_path.iterdir())


def test_two_calls_are_too_few(capsys: pytest.CaptureFixture[str]):
    assert main(["--calls", "2"]) == 2
    assert "--calls must be at least 3: the first call compiles" in capsys.readouterr().err
