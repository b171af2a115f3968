"""Runs a file of prompts, some lines at a time."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from jaxspec.engine.async_engine import Chunk
from jaxspec.engine.generation import ErrorKind
from jaxspec.llm.batch.prompt_file import parse_line
from jaxspec.llm.progress_bar import speed_text

type Answer = Callable[[int, Mapping[str, Any]], Awaitable[dict[str, Any]]]


class EngineFailed(RuntimeError):
    """The engine has interrupted its requests: it is the run that has failed, not a line."""


class Tally:
    """What engines have generated. ``observe`` is an AsyncLLM's on_chunk.

    Attributes:
      tokens: of all requests.
      failure: what an engine failed with.
    """

    def __init__(self):
        self.tokens = 0
        self.failure: str | None = None
        self._rounds = self._round_tokens = 0
        self._lock = threading.Lock()  # engines have threads of their own

    def observe(self, chunk: Chunk) -> None:
        with self._lock:
            self.tokens += len(chunk.token_ids)
            if chunk.done:
                self._rounds += chunk.generation.statistics.rounds
                self._round_tokens += max(len(chunk.generation.token_ids) - 1, 0)
            if chunk.generation.error_kind is ErrorKind.INTERRUPTED:
                self.failure = chunk.error

    def speed(self, seconds: float) -> str:
        """Tokens/s, and how many tokens a round committed on average, of requests that ended."""
        return speed_text(self.tokens, self._round_tokens, self._rounds, seconds)


async def run_batch(
    lines: Iterator[tuple[int, bytes]],
    answer: Answer,
    keep: Callable[[int, dict[str, Any]], None],
    tally: Tally,
    *,
    in_flight: int,
) -> None:
    """Answer lines, and keep each result as soon as it is there.

    Args:
      lines: index and text of each; they are read as they are needed.
      answer: of a line's index and object; it gives a result, also of a line that is wrong.
      keep: called with a line's index and result, in the order in which they come.
      in_flight: lines that are under way at a time; more than rows, so that none is empty.

    Raises EngineFailed; the results before it are kept.
    """

    async def work() -> None:
        for index, text in lines:  # all workers take from the same
            result = await _answer(answer, index, text)
            if tally.failure is not None:
                raise EngineFailed(tally.failure)
            keep(index, result)

    workers = [asyncio.create_task(work()) for _ in range(in_flight)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _answer(answer: Answer, index: int, text: bytes) -> dict[str, Any]:
    try:
        line = parse_line(text)
    except ValueError as error:
        return {"id": None, "error": str(error)}
    return await answer(index, line)
