"""The command ``jaxspec bench repair``."""

import json

import pytest

from jaxspec.commands.bench.repair import main


@pytest.mark.slow
def test_repaired_texts_are_right_and_keep_something(capsys: pytest.CaptureFixture[str]):
    small = ["--prompts", "2", "--samples", "2", "--new-tokens", "32", "--written", "16"]
    run = [*small, "--steps", "1e-6", "1e-3", "--repeats", "1", "--no-compilation-cache", "--json"]
    assert main(run) == 0
    parts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    near, far = (part["timings"][0] for part in parts)
    assert near["wrong_texts"] == far["wrong_texts"] == 0
    assert near["kl"] < far["kl"] and near["kept"] > far["kept"]
    assert near["repair"]["mean_rounds"] < near["restart"]["mean_rounds"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--written", "96"], "--written must be below --new-tokens (96)"),
        (["--temperature", "0"], "--temperature must be above 0"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(options) == 2
    assert message in capsys.readouterr().err
