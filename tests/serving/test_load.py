"""Many clients at once, some of which are killed, on the built-in model."""

import asyncio
from pathlib import Path

import pytest

from jaxspec.checkpoints.built_in import BUILT_IN_HEAD
from jaxspec.commands import quantize
from tests.helpers.http_load import SERVER, answers, load
from tests.helpers.serve_process import serve_process

ROWS = ("--max-rows", "2")  # few programs: they take most of the time
REQUESTS, DIFFERENT = 96, 16  # of which 8 have other options each, twice


@pytest.mark.slow
def test_all_who_are_not_killed_get_their_text(tmp_path: Path):
    with serve_process(*SERVER, *ROWS, "--compilation-cache", str(tmp_path)) as server:
        report = asyncio.run(load(server, REQUESTS, clients=64, different=DIFFERENT))
        assert (report.wrong, report.compiled) == ([], 0)
        assert report.requests >= REQUESTS and report.killed > 5
        assert server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0


@pytest.mark.slow
def test_weights_of_4_bits_and_an_8_bit_cache_serve_the_texts_of_plain_decoding(tmp_path: Path):
    """The drafter is the head that was trained for the weights before they were quantized."""
    model = tmp_path / "model"
    words = ["--method", "rtn", "--group", "64", "--out", str(model), "--no-compilation-cache"]
    assert quantize.main(words) == 0
    options = (*SERVER, *ROWS, "--model", str(model), "--kv-dtype", "fp8")
    options += ("--compilation-cache", str(tmp_path / "programs"))
    with serve_process(*options, "--drafter", "none") as server:
        plain = asyncio.run(answers(server, DIFFERENT))
    with serve_process(*options, "--drafter", str(BUILT_IN_HEAD)) as server:
        report = asyncio.run(load(server, REQUESTS, clients=64, different=DIFFERENT))
        assert report.alone == plain
        assert (report.wrong, report.compiled) == ([], 0)
        assert report.requests >= REQUESTS and report.killed > 5
        assert server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0
