"""A run of lines: some at a time, and what a failure leaves."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.async_engine import Chunk
from jaxspec.engine.generation import ErrorKind, Generation, RequestStatistics
from jaxspec.llm.batch.run import EngineFailed, Tally, run_batch


def run(lines: Iterator[tuple[int, bytes]], answer: Any, tally: Tally | None = None, rows: int = 4):
    kept: dict[int, Any] = {}
    batch = run_batch(lines, answer, kept.__setitem__, tally or Tally(), in_flight=rows)
    try:
        asyncio.run(batch)
    except EngineFailed as error:
        return kept, error
    return kept, None


def numbered(count: int) -> Iterator[tuple[int, bytes]]:
    return ((index, json.dumps({"prompt": index}).encode()) for index in range(count))


def test_lines_are_read_as_they_are_needed():
    read, ended, most = 0, 0, 0

    def lines() -> Iterator[tuple[int, bytes]]:
        nonlocal read, most
        for line in numbered(100_000):
            read += 1
            most = max(most, read - ended)
            yield line

    async def answer(index: int, line: Any) -> dict[str, Any]:
        nonlocal ended
        await asyncio.sleep(0)
        ended += 1
        return {"text": line["prompt"]}

    kept, _ = run(lines(), answer)
    assert kept == {index: {"text": index} for index in range(100_000)}
    assert most == 4  # all four are busy, and no more


def test_a_bad_line_does_not_stop_the_others():
    async def answer(index: int, line: Any) -> dict[str, Any]:
        return {"text": line["prompt"]}

    kept, _ = run(
        iter([(0, b'{"prompt": 0}'), (1, b"{"), (2, b"[]"), (3, b'{"prompt": 3}')]), answer
    )
    assert kept[0] == {"text": 0} and kept[3] == {"text": 3}
    assert kept[1]["error"].startswith("the line is not JSON")
    assert kept[2]["error"].startswith("the line must be a JSON object")


def test_a_failure_of_the_engine_is_no_result():
    tally = Tally()
    generation = Generation("0", (1,), SamplingParams(), RequestStatistics(0, 0, [0]))

    async def answer(index: int, line: Any) -> dict[str, Any]:
        if index == 5:
            generation.fail(ErrorKind.INTERRUPTED, "interrupted: OutOfMemory")
            tally.observe(Chunk([], generation, True, "error", generation.error))
        return {"text": ""}

    kept, error = run(numbered(10), answer, tally, rows=1)
    assert sorted(kept) == list(range(5)) and str(error) == "interrupted: OutOfMemory"


def test_an_error_ends_the_run_and_what_is_under_way():
    cancelled = []

    async def answer(index: int, line: Any) -> dict[str, Any]:
        if index == 2:
            raise OSError("no space left")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(index)
            raise
        return {}

    with pytest.raises(OSError, match="no space left"):
        run(numbered(10), answer)
    assert cancelled == [0, 1, 3]


def test_the_tally_counts_tokens_and_rounds():
    tally = Tally()
    statistics = RequestStatistics(rounds=4, drafted=8, accepted=[4, 3, 2])
    generation = Generation("0", (1,), SamplingParams(), statistics, [1] * 11)
    tally.observe(Chunk([1] * 5, generation))
    tally.observe(Chunk([1] * 6, generation, True, "length"))
    assert tally.tokens == 11
    assert tally.speed(2.0) == "6 tokens/s, 2.50 tokens a round"
