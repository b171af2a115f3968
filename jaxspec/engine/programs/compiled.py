"""Which programs of an engine are compiled, and what runs while one is not."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import jax

from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.state import EngineState
from jaxspec.engine import memory
from jaxspec.engine.programs.names import program_name
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey, compiles_alone

logger = logging.getLogger("jaxspec.programs")  # a line for each that was compiled


class CompiledPrograms:
    """The compiled programs of an engine, by key.

    Attributes:
      state: what the last program launched returns.
      compiled: programs compiled so far, and ``compile_seconds`` what that took.
      compiling: what is compiled now while the calls wait, as people call it; None: nothing.
      ready, coming: keys of the compiled programs, and of those that other threads compile.
      sealed: compile nothing any more where a ready program would do.
      ask: begins to compile a program in another thread; meanwhile a ready one runs that holds its
        calls. None: a program is compiled when it is first needed.
    """

    state: EngineState

    def __init__(self, max_programs: int, page_size: int):
        self.max_programs, self._page_size = max_programs, page_size
        self.compiling: str | None = None
        self.compiled, self.compile_seconds, self.sealed = 0, 0.0, False
        self.ready: set[Any] = set()
        self.coming: dict[Any, Future[Any]] = {}
        self.ask: Callable[[ReadKey | RoundsKey], bool] | None = None

    @property
    def compiles_now(self) -> bool:
        """Whether another thread compiles, which takes time from the calls that run."""
        return not all(future.done() for future in self.coming.values())

    def runnable(self) -> set[Any]:
        """Keys of programs that run without waiting for a compilation."""
        return self.ready | {key for key, future in self.coming.items() if future.done()}

    def stand_in[K: ReadKey | RoundsKey](self, key: K) -> K | None:
        """The cheapest program that can run these calls at once; None: there is none."""
        return cheapest(self.runnable(), key)

    def now[K: ReadKey | RoundsKey](self, key: K) -> K:
        """``key``, or what runs instead while another thread compiles it."""
        if self.ask is None or key in self.runnable() or not compiles_alone(key):
            return key
        stand_in = self.stand_in(key) or cheapest(self.coming, key)
        if stand_in is None:
            return key
        if is_smaller(key, stand_in):
            self.ask_for(key, [stand_in])
        return stand_in

    def ask_for(
        self, key: ReadKey | RoundsKey, serving: Iterable[ReadKey | RoundsKey | None]
    ) -> None:
        """Let another thread compile a program, if it may. Where those that are ``serving`` also
        sample, so does this one: else there would soon be two."""
        if self.ask is not None:
            samples = any(each is not None and each.kind >= Kind.SAMPLED for each in serving)
            self.ask(key._replace(kind=max(key.kind, Kind.SAMPLED)) if samples else key)

    @contextlib.contextmanager
    def counted(self, key: Any) -> Iterator[None]:
        """Around the run of a program: the first run compiles it, which is measured."""
        if key in self.ready:
            yield
            return
        self._forget_if_many()
        jax.block_until_ready(self.state)
        started, self.compiling = time.perf_counter(), self.name(key)
        try:
            future = self.coming.pop(key, None)
            if future is not None and not future.cancel():
                wait([future])  # its errors come again below
            yield
            jax.block_until_ready(self.state)
        finally:
            self.compiling = None
        self.compiled += 1
        seconds = time.perf_counter() - started
        self.compile_seconds += seconds
        self.ready.add(key)
        logger.info("compiled %s: %.1f s", self.name(key), seconds)

    def compiled_now(self) -> list[str]:
        """What is compiled now, here and in other threads, as people call it; for any thread."""
        coming = [key for key, future in list(self.coming.items()) if future.running()]
        here = [] if self.compiling is None else [self.compiling]
        return [*here, *map(self.name, coming)]

    def name(self, key: Any) -> str:
        """What a program is called where people read of it."""
        return program_name(key, self._page_size)

    def is_ready(self, key: Any) -> bool:
        """Whether a program need not be prepared: it has run, or another thread has compiled it."""
        future = self.coming.get(key)
        if key not in self.ready and future is not None and _has_result(future):
            self._forget_if_many()
            self.coming.pop(key, None)
            self.compiled += 1
            self.ready.add(key)
        return key in self.ready

    def _forget_if_many(self) -> None:
        """Forget all programs if there are too many."""
        if len(self.ready) < self.max_programs and not memory.maps_are_scarce():
            return
        self.clear_caches()
        self.ready.clear()
        self.coming.clear()

    def check_weights(self, params: EngineParams) -> None:
        """Raise ValueError if these cannot take the place of those in use; before anything is done
        for them."""

    def clear_caches(self) -> None:
        """Forget the compiled programs of all functions."""
        raise NotImplementedError


def _has_result(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def is_smaller(key: ReadKey | RoundsKey, stand_in: ReadKey | RoundsKey) -> bool:
    """Whether a program would be faster than what runs instead: else they differ in kind alone."""
    return stand_in.cost > key.cost or stand_in.undrafted != key.undrafted


def cheapest[K: ReadKey | RoundsKey](keys: Iterable[Any], wanted: K) -> K | None:
    """The cheapest of these programs that serves the wanted one's calls, itself if it is there."""
    kind: type[Any] = type(wanted)
    fitting = [key for key in keys if isinstance(key, kind) and key.holds(wanted)]
    return min(fitting, key=lambda key: (key != wanted, key.cost, not key.undrafted), default=None)
