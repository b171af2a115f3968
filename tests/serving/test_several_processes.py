"""`jaxspec serve` in two processes that share a model."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.helpers.serve_process import ServeProcess, serve_process
from tests.helpers.several_processes import free_port, started

LIMIT = 120  # seconds
REQUEST = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 24, "temperature": 0.8, "seed": 3}


def text(own: ServeProcess) -> str:
    answer = httpx.post(f"{own.address}/v1/completions", json=REQUEST, timeout=LIMIT)
    return answer.raise_for_status().json()["choices"][0]["text"]


@pytest.mark.slow
def test_two_processes_answer_what_one_answers_and_end_together(model: Path):
    options = ["--model", str(model), "--served-model-name", "tiny", "--drafter", "ngram"]
    options += ["--max-rows", "2", "--max-length", "256", "--warm-up", "none"]
    with serve_process(*options, "--no-compilation-cache") as one:
        expected = text(one)
    assert expected
    several = ["--tp", "2", "--coordinator", f"localhost:{free_port()}", "--num-processes", "2"]
    second = ["-m", "jaxspec", "serve", *options, *several, "--process-id", "1"]
    with started([second]) as [follower]:
        with serve_process(*options, *several, "--process-id", "0") as first:
            assert text(first) == expected
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(LIMIT) == 0
        assert follower.wait(LIMIT) == 0, follower.communicate()
