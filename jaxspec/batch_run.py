"""One running batch of requests: results of a call are read while the next call runs."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxspec.config.speculation import TreeShape
from jaxspec.engine import Engine
from jaxspec.scheduling.batching import BatchPlan
from jaxspec.scheduling.requests import SamplingParams, check_count
from jaxspec.state import Emitted, Ending, EngineState, Status


@dataclasses.dataclass(frozen=True)
class Progress:
    """The results of one call: new tokens of each request, and which requests are done."""

    new_tokens: list[list[int]]
    done: list[bool]


@dataclasses.dataclass
class RequestStatistics:
    """Rounds of one request; ``accepted[d]`` counts those that accepted at least d tokens."""

    rounds: int
    drafted: int
    accepted: list[int]


@dataclasses.dataclass
class Timings:
    """Seconds spent waiting for the programs; ``compile``: for their compilation."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class _Call(NamedTuple):
    rows: np.ndarray | None  # None: all
    emitted: Emitted


class Run:
    """One running batch. Iterate it for Progress; then read ``timings`` and ``statistics``.

    The iteration may be interrupted and resumed. The engine runs no other batch until this one has
    ended or ``abort`` was called.

    Args:
      rounds_per_call: most rounds of one call, after which the results are read; at most the
        engine's.
      shape: shape of the draft trees; None: the engine's. The attribute may be set between two
        iterations and takes effect with the next call; in float32 the text stays the same. A new
        shape compiles a program.

    Raises ValueError for invalid requests, RuntimeError while another batch is running.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        rounds_per_call: int | None = None,
        shape: TreeShape | None = None,
    ):
        self.plan: BatchPlan = engine.plan(prompts, sampling)
        self.timings = Timings()
        depth = engine.params.speculation.max_depth
        self.statistics = [RequestStatistics(0, 0, [0] * (depth + 1)) for _ in prompts]
        self.endings = [Ending.NONE for _ in prompts]
        self._done = [False for _ in prompts]
        self._engine, self.shape = engine, shape
        if rounds_per_call is not None:
            check_count("rounds_per_call", rounds_per_call)
        self._most_rounds = min(rounds_per_call or engine.rounds_per_call, engine.rounds_per_call)
        self._state: EngineState | None = engine.begin(self.plan, self)
        self._steps = self._generate()

    def __iter__(self) -> Iterator[Progress]:
        return self

    def __next__(self) -> Progress:
        try:
            return next(self._steps)
        except BaseException:
            self.abort()  # after the end or an error, the engine gets its pool back
            raise

    def prepare(self) -> None:
        """Compile every program of the batch now instead of at its first use."""
        started = time.perf_counter()
        self._state = self._engine.prepare_reading(self._own(), self.plan)
        self._state = self._engine.prepare_rounds(self._own(), self.plan, self.shape)
        self.timings.compile += time.perf_counter() - started

    def abort(self) -> None:
        """Stop the batch, so that the engine can run another. No effect once it has ended."""
        if self._state is not None:
            self._engine.end(self._state)
            self._state = None
            self._steps = iter(())

    def _generate(self) -> Iterator[Progress]:
        engine, plan = self._engine, self.plan
        started = time.perf_counter()
        self._state = engine.prepare_reading(self._own(), plan)
        self.timings.compile += time.perf_counter() - started
        started = time.perf_counter()
        chunks: list[_Call] = []
        for index in range(plan.num_chunks):
            rows = plan.chunk_rows(index)
            self._state, emitted = engine.read_chunk(self._own(), plan, rows)
            chunks.append(_Call(rows, emitted))
        progress = self._read(chunks)
        self.timings.prefill = time.perf_counter() - started
        yield progress  # the first tokens are delivered before more is compiled
        if all(progress.done):
            return
        started = time.perf_counter()
        self._state = engine.prepare_rounds(self._own(), plan, self.shape)
        self.timings.compile += time.perf_counter() - started
        rounds = 1  # the first call is short, so that its tokens are delivered early
        ahead: list[_Call] = []
        while not all(progress.done):
            started = time.perf_counter()
            self._state, emitted = engine.run_rounds(self._own(), plan, rounds, self.shape)
            ready, ahead = ahead, [_Call(None, emitted)]
            read = self._read(ready) if ready else None
            self.timings.decode += time.perf_counter() - started
            rounds = min(2 * rounds, self._most_rounds)
            if read is not None:
                progress = read
                yield progress

    def _own(self) -> EngineState:
        assert self._state is not None
        return self._state

    def _read(self, calls: list[_Call]) -> Progress:
        """Wait for some calls, and collect their results."""
        host: list[_Call] = jax.device_get(calls)
        new_tokens: list[list[int]] = [[] for _ in self.plan.prompts]
        for rows, emitted in host:
            for place, row in enumerate(range(self.plan.num_rows) if rows is None else rows):
                if row >= len(new_tokens):
                    continue  # padding
                new_tokens[row] += _tokens_of(emitted, place)
                _count(self.statistics[row], emitted, place)
                self.endings[row] = Ending(int(emitted.ending[place]))
                self._done[row] = bool(emitted.status[place] == Status.DONE)
        return Progress(new_tokens, list(self._done))


def _tokens_of(emitted: Emitted, place: int) -> list[int]:
    """Tokens that a call committed to one of its rows, in order."""
    counts = np.asarray(emitted.counts)[:, place]
    kept = np.arange(emitted.tokens.shape[2]) < counts[:, None]
    return np.asarray(emitted.tokens)[:, place][kept].tolist()


def _count(statistics: RequestStatistics, emitted: Emitted, place: int) -> None:
    """Add the rounds of one call to a request's statistics. A prefill call has no rounds."""
    if emitted.num_rounds == 0:
        return
    ran = np.asarray(emitted.counts)[:, place] > 0
    accepted = np.asarray(emitted.accepted)[:, place][ran]
    statistics.rounds += int(ran.sum())
    statistics.drafted += int(np.asarray(emitted.drafted)[:, place][ran].sum())
    for depth in range(len(statistics.accepted)):
        statistics.accepted[depth] += int((accepted >= depth).sum())
