"""`jaxspec bench http` on a tiny model: all three ways give all tokens."""

import json
from pathlib import Path

import pytest

from jaxspec.commands.bench import http as bench_http
from tests.helpers.checkpoints import tiny_byte_llama


@pytest.mark.slow
def test_all_ways_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tiny_byte_llama(tmp_path, eos_token_id=256)
    words = ["--model", str(model), "--drafter", "ngram", "--streams", "2"]
    words += ["--new-tokens", "8", "--repeats", "1", "--json"]
    assert bench_http.main(words) == 0
    results = json.loads(capsys.readouterr().out)
    assert set(results["tokens_per_second"]) == set(bench_http.NAMES)
    assert all(rate > 0 for [rate] in results["tokens_per_second"].values())
    assert results["of_engine"]["engine"] == 1
    assert 0 < results["server_thread_busy"] < 1
