"""`jaxspec measure-perplexity`: models on the same held-out rows."""

import json
from pathlib import Path

import pytest

from jaxspec.commands import measure_perplexity, quantize
from tests.helpers.checkpoints import tiny_llama


def options(data: Path, *models: Path) -> list[str]:
    size = ("--length", "32", "--held-out", "5", "--batch", "4")
    return ["--model", *map(str, models), "--data", str(data), *size]


def test_models_are_compared_with_the_first(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rounded = tmp_path / "rounded"
    words = ["--method", "rtn", "--model", str(model), "--group", "32", "--out", str(rounded)]
    words.append("--no-compilation-cache")
    assert quantize.main(words) == 0
    capsys.readouterr()
    assert measure_perplexity.main([*options(data, model, rounded, model), "--json"]) == 0
    output = capsys.readouterr()
    first, other, again = json.loads(output.out)["results"]
    assert first["worse"] == 0 and again["perplexity"] == first["perplexity"]
    low, high = other["worse_interval"]
    assert low < other["worse"] < high and other["tokens"] == first["tokens"] > 0
    assert other["worse"] == pytest.approx(other["nats"] - first["nats"])
    assert f"{other['perplexity']:.3f}" in output.err


def test_models_must_share_a_vocabulary(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = tiny_llama(tmp_path, vocab_size=96)
    assert measure_perplexity.main(options(data, model, other)) == 2
    assert "the models have vocabularies of" in capsys.readouterr().err
