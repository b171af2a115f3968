"""Compiles what a new kind of request needs beside the work, while others are served.

A server is ready with few programs. The first request with log-probabilities, penalties, a
structured output or a long text needs others. Were they compiled when the request runs, all that
run would wait. So it is held back until they are there.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.compiled import cheapest
from jaxspec.engine.programs.sizes import (
    SMALLEST_CHUNK,
    Kind,
    ReadKey,
    RoundsKey,
    Sizes,
)
from jaxspec.engine.warm_up.compile_early import compile_beside

THREADS = 2  # kinds that come together are compiled side by side
WIDER = 4  # a prompt is read by a ready program of at most so many times its width


class RequestKind(NamedTuple):
    """What decides which programs a request needs.

    Attributes:
      reads, rounds: kinds of programs.
      width: tokens that are read at a time.
      columns: of page tables.
      plain: nothing is drafted.
    """

    reads: Kind
    rounds: Kind
    masked: bool
    width: int
    columns: int
    plain: bool

    @classmethod
    def of(cls, prompt: Sequence[int], sampling: SamplingParams, sizes: Sizes) -> "RequestKind":
        """That of a request; of rare kinds all have the longest texts, and masked ones controls,
        so that there are few."""
        reads, rounds = Kind.of(sampling, reads=True), Kind.of(sampling)
        masked = sampling.structured is not None
        reads, rounds = (max(kind, Kind.SAMPLED) for kind in (reads, rounds))
        if masked or rounds >= Kind.FULL:
            reads, rounds = max(reads, Kind.FULL), Kind.FULL
        tokens = min(len(prompt) + int(sampling.max_tokens), sizes.max_length)
        columns = sizes.columns if reads >= Kind.FULL else sizes.columns_for(tokens)
        width = sizes.width_for(min(len(prompt), sizes.max_chunk))
        return cls(reads, rounds, masked, width, columns, sampling.plain)


class CompilesKinds:
    """Compiles the programs of kinds of requests in threads of its own.

    Rounds have as many rows as the engine, so that they serve any load, and draft nothing where the
    engine chooses its trees: it compiles others when it wants them. Prompts are read one by one.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "jaxspec-compile")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, engine: Engine, kinds: Sequence[RequestKind]) -> list[Future[Any]]:
        """Begin to compile what requests of these kinds need and is not there; called in the
        engine's thread. Returns what must be waited for."""
        programs = engine.programs
        if not (programs.compiles_beside and programs.sealed):
            return []
        keys = dict.fromkeys(key for kind in kinds for key in _needed(engine, kind))
        return [self.begin_program(engine, key) for key in keys]

    def begin_program(self, engine: Engine, key: ReadKey | RoundsKey) -> Future[Any]:
        """Begin to compile a program that is not ready; called in the engine's thread."""
        programs = engine.programs
        if key not in programs.coming:
            with programs.controlled(key.kind):
                state = programs.state
            programs.coming[key] = self._pool.submit(compile_beside, programs, key, state)
        return programs.coming[key]


async def all_done(futures: Sequence[Future[Any]]) -> None:
    """Wait for programs. An error of the compiler comes again when they run."""
    if not futures:
        return
    # They are shared: a client that goes away cancels none of them.
    done, _ = await asyncio.wait(list(map(asyncio.wrap_future, futures)))
    for future in done:
        _ = future.cancelled() or future.exception()


def _needed(engine: Engine, kind: RequestKind) -> list[ReadKey | RoundsKey]:
    """The programs of a kind that cannot run now."""
    programs, runnable = engine.programs, engine.programs.runnable()
    sizes = programs.sizes
    most = sizes.num_rows // programs.shards
    reading = ReadKey(sizes.rows_for(1), kind.columns, kind.width, kind.reads, kind.masked)
    found = cheapest(runnable, reading)
    reads = found is not None and found.width <= max(SMALLEST_CHUNK, WIDER * kind.width)
    shapes = engine.shapes.compiled_ahead(engine.shape)
    shape = PLAIN if kind.plain or PLAIN in shapes else shapes[-1]
    lengths = {1, sizes.fixed_rounds} if sizes.fixed_rounds and not kind.masked else {0}
    rounds = [
        RoundsKey(sizes.rows_for(most), kind.columns, shape, kind.rounds, kind.masked, length)
        for length in sorted(lengths)
    ]
    if not kind.plain:  # any tree will do
        runnable = {
            key._replace(shape=shape) if isinstance(key, RoundsKey) else key for key in runnable
        }
    missing = [key for key in rounds if cheapest(runnable, key) is None]
    return [*missing, *([] if reads else [reading])]
