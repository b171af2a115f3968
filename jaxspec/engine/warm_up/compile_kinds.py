"""Compiles what kinds of requests need beside the work, while others are served.

Some few programs serve any request, if not as fast as those that are made for its kind: a server
is ready when they are there (see compile_general.py). A kind that comes often gets programs of its
own beside the work. Where no program serves a kind, as in engines that were not made ready so, its
requests are held back until there is one: were it compiled when they run, all that run would wait.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey, Sizes
from jaxspec.engine.warm_up.compile_early import compile_beside
from jaxspec.scheduling.plan import QueueFull

THREADS = 2  # kinds that come together are compiled side by side
LARGER = 4  # a program of a kind's own takes at most so many times what the kind needs
OFTEN = 8  # requests of a kind before it gets programs of its own beside the work

type Key = ReadKey | RoundsKey
type Run = Callable[[Callable[[Engine], list[Future[Any]]]], Awaitable[list[Future[Any]]]]


class RequestKind(NamedTuple):
    """What decides which programs a request needs.

    Attributes:
      reads, rounds: kinds of programs.
      width: tokens that are read at a time.
      columns: of page tables.
      masked: the host is in the middle of each round.
      plain: nothing is drafted.
    """

    reads: Kind
    rounds: Kind
    masked: bool
    width: int
    columns: int
    plain: bool

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        sampling: SamplingParams,
        sizes: Sizes,
        *,
        host_drafts: bool = False,
    ) -> "RequestKind":
        """That of a request; of rare kinds all have the longest texts, and structured ones
        controls, so that there are few."""
        reads, rounds = Kind.of(sampling, reads=True), Kind.of(sampling)
        structured = sampling.structured is not None
        reads, rounds = (max(kind, Kind.SAMPLED) for kind in (reads, rounds))
        if structured or rounds >= Kind.FULL:
            reads, rounds = max(reads, Kind.FULL), max(rounds, Kind.FULL)
        tokens = min(len(prompt) + int(sampling.max_tokens), sizes.max_length)
        columns = sizes.columns if reads >= Kind.FULL else sizes.columns_for(tokens)
        width = sizes.width_for(min(len(prompt), sizes.max_chunk))
        return cls(reads, rounds, structured or host_drafts, width, columns, sampling.plain)


class CompilesKinds:
    """Compiles the programs of kinds of requests in threads of its own.

    Rounds have as many rows as the engine, so that they serve any load, and draft nothing where the
    engine chooses its trees: it compiles others when it wants them. Prompts are read one by one.

    Attributes:
      held: requests that are held back now.
    """

    def __init__(self) -> None:
        self.held = 0
        self._pool = ThreadPoolExecutor(THREADS, "jaxspec-compile")
        self._served: set[RequestKind] = set()
        self._asked: collections.Counter[RequestKind] = collections.Counter()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def wait_for(self, kinds: Sequence[RequestKind], run: Run, most: int | None) -> None:
        """Wait until requests of these kinds, one each, can run.

        Args:
          run: calls a function in the engine's thread, see AsyncEngine.run.
          most: requests that may wait; None: any number.

        Raises QueueFull if too many wait.
        """
        self._asked.update(kinds)
        new = set(kinds) - self._served
        often = {kind for kind in kinds if self._asked[kind] == OFTEN}
        if often:
            await run(lambda engine: self.begin(engine, often, lacking))
        if not new:
            return
        if most is not None and self.held + len(kinds) > most:
            raise QueueFull("too many requests wait for their programs")
        self.held += len(kinds)
        try:
            await all_done(await run(lambda engine: self.begin(engine, new, needed)))
        finally:
            self.held -= len(kinds)
        self._served |= new

    def begin(
        self,
        engine: Engine,
        kinds: Iterable[RequestKind],
        missing: Callable[[Engine, RequestKind], list[Key]],
    ) -> list[Future[Any]]:
        """Begin to compile what is ``missing`` for these kinds; called in the engine's thread."""
        programs = engine.programs
        if not (programs.compiles_beside and programs.sealed):
            return []
        keys = dict.fromkeys(key for kind in sorted(kinds) for key in missing(engine, kind))
        return [self.begin_program(engine, key) for key in keys]

    def begin_program(self, engine: Engine, key: Key) -> Future[Any]:
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


def needed(engine: Engine, kind: RequestKind) -> list[Key]:
    """The programs without which no request of a kind can run now. Prompts are read in parts if
    they are longer than a program reads at a time."""
    reading, rounds, ready = _programs(engine, kind)
    missing: list[Key] = [key for key in rounds if not _holding(ready, key)]
    return [*missing, *([] if _holding(ready, reading._replace(width=0)) else [reading])]


def lacking(engine: Engine, kind: RequestKind) -> list[Key]:
    """The programs of a kind's own that are not there, nor others that are hardly slower."""
    reading, rounds, ready = _programs(engine, kind)
    missing: list[Key] = [key for key in rounds if not _holding(ready, key, close=True)]
    return [*missing, *([] if _holding(ready, reading, close=True) else [reading])]


def _programs(
    engine: Engine, kind: RequestKind
) -> tuple[ReadKey, list[RoundsKey], Collection[Any]]:
    """What reads the prompts of a kind, what runs its rounds, and all that can run now: with any
    tree, unless the kind asks for none."""
    rounds, ready = rounds_keys(engine, kind), engine.programs.runnable()
    if not kind.plain:
        shape = rounds[0].shape
        ready = {key._replace(shape=shape) if isinstance(key, RoundsKey) else key for key in ready}
    return reading_key(engine, kind), rounds, ready


def _holding[K: (ReadKey, RoundsKey)](
    ready: Collection[Any], wanted: K, *, close: bool = False
) -> list[K]:
    """The programs that run another's calls; if ``close``, those that are hardly slower."""
    found = [key for key in ready if isinstance(key, type(wanted)) and key.holds(wanted)]
    if not close:
        return found
    return [key for key in found if key.kind == wanted.kind and key.cost <= LARGER * wanted.cost]


def reading_key(engine: Engine, kind: RequestKind) -> ReadKey:
    """The program that reads the prompts of a kind, one at a time."""
    rows = engine.programs.sizes.rows_for(1)
    return ReadKey(rows, kind.columns, kind.width, kind.reads, kind.masked)


def rounds_keys(engine: Engine, kind: RequestKind) -> list[RoundsKey]:
    """The programs that run the rounds of a kind, of as many rows as the engine has."""
    sizes = engine.programs.sizes
    rows = sizes.rows_for(sizes.num_rows // engine.programs.shards)
    lengths = {1, sizes.fixed_rounds} if sizes.fixed_rounds and not kind.masked else {0}
    shape, columns = _shape(engine, kind), kind.columns
    return [
        RoundsKey(rows, columns, shape, kind.rounds, kind.masked, length)
        for length in sorted(lengths)
    ]


def _shape(engine: Engine, kind: RequestKind) -> TreeShape:
    shapes = engine.shapes.compiled_ahead(engine.shape)
    return PLAIN if kind.plain or PLAIN in shapes else shapes[-1]
