"""Runs a workload on an engine as clients would, and measures what they and the device see."""

import contextlib
import dataclasses
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import TreeShape
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.programs.call import Call
from jaxspec.evaluation.benchmarks.workloads import Arrival

PERCENTILES = (50, 90, 99)
USAGE_EVERY = 0.05  # seconds between two looks at the pages
# A JSON string that no request is long enough to end, so that each gets its number of tokens.
ENDLESS = StructuredOutput(json_schema={"type": "string", "minLength": 100_000})


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """What a load test measured. Times are in seconds.

    Attributes:
      requests: that ended as they should; ``failed`` are the others.
      generated_per_second, total_per_second: new tokens, and those of prompts too.
      first_token: from a request's arrival, waiting included; percentiles.
      between_tokens: of each request, from its first token to its last, by token; percentiles.
      between_deliveries: from one piece of text to the next (of several tokens); percentiles.
      longest_gap: the longest of these.
      device_idle: share of the time in which no call was in flight.
      without_requests: share of the time in which there was no request to run, either.
      kv_waste: mean share of the slots, in pages that hold tokens, without one.
      kv_used: largest share of the pages that requests held.
      prompt_hits: share of the prompts' tokens that the prefix cache had; ``prompt_hit_tokens`` is
        their number.
      tokens_per_round: tokens that a round committed on average, bonus included.
      accepted_by_depth: share of the rounds that accepted at least 1, 2, ... drafted tokens.
      rounds_by_shape: rounds that calls ran, by the shape of their trees.
      structured: requests with a structured output.
      unstructured_seconds: from the start to the end of the last request without one; 0 if all are
        structured. ``unstructured_per_second`` are new tokens of these requests in that time.
      structured_between_tokens, unstructured_between_tokens: as between_tokens, of these requests.
      compiled: programs that were compiled meanwhile.
    """

    seconds: float
    requests: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    generated_per_second: float
    total_per_second: float
    first_token: dict[str, float]
    between_tokens: dict[str, float]
    between_deliveries: dict[str, float]
    longest_gap: float
    device_idle: float
    without_requests: float
    kv_waste: float
    kv_used: float
    prompt_hits: float
    prompt_hit_tokens: int
    tokens_per_round: float
    accepted_by_depth: list[float]
    preemptions: dict[str, int]
    rounds_by_shape: dict[str, int]
    structured: int
    unstructured_seconds: float
    unstructured_per_second: float
    structured_between_tokens: dict[str, float]
    unstructured_between_tokens: dict[str, float]
    compiled: int


@dataclasses.dataclass
class Client:
    """A request as its client sees it; times are on the test's clock."""

    arrived: float
    generation: Generation
    times: list[float] = dataclasses.field(default_factory=list)  # of each piece
    seen: int = 0  # tokens

    def look(self, now: float) -> None:
        if len(self.generation.token_ids) > self.seen:
            self.seen = len(self.generation.token_ids)
            self.times.append(now)

    @property
    def is_structured(self) -> bool:
        return self.generation.sampling.structured is not None

    @property
    def first_token(self) -> float:
        return self.times[0] - self.arrived

    @property
    def between_tokens(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, self.seen - 1)


class DeviceWatch:
    """Notes when calls were launched, and when their results were ready.

    A thread waits for the results, since the engine may look at them later. Launching counts as
    idle until it has returned; so the idle time is rather too long than too short.
    """

    def __init__(self):
        self.calls: list[tuple[float, float]] = []  # launched, ready
        self._launched: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="device watch", daemon=True)

    def launched(self, calls: list[Call]) -> None:
        for call in calls:
            self._launched.put(call)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._launched.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (call := self._launched.get()) is not None:
            jax.block_until_ready(call.emitted)
            self.calls.append((call.launched, time.perf_counter()))

    def idle(self, started: float, finished: float) -> float:
        """Seconds in which no call was in flight."""
        idle, ready = 0.0, started
        for launched, call_ready in self.calls:
            idle += max(0.0, launched - ready)
            ready = max(ready, call_ready)
        return idle + max(0.0, finished - ready)


@dataclasses.dataclass
class _Usage:
    """What the pages were used for, looked at now and then."""

    wastes: list[float] = dataclasses.field(default_factory=list)
    used: float = 0.0
    looked: float = 0.0

    def look(self, engine: Engine, now: float) -> None:
        if now - self.looked < USAGE_EVERY:
            return
        usage, self.looked = engine.scheduler.usage(), now
        self.used = max(self.used, usage.used)
        if usage.context:
            self.wastes.append(usage.waste)


class LoadTest:
    """A workload on an engine of its own.

    Args:
      temperature: of all requests. Stop tokens do not end them, so that each has its length.
    """

    def __init__(self, engine: Engine, arrivals: Sequence[Arrival], temperature: float = 0.0):
        self.engine = engine
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival.time)
        self.temperature = temperature
        self.clients: list[Client] = []
        self.usage = _Usage()
        self.without_requests = 0.0

    def warm_up(self) -> None:
        """Compile, by running the workload; its pages are not found again. Then compile no more
        where a program is ready. An adaptive engine compiles for all its trees, and measures them,
        before that."""
        self.engine.programs.sealed = False

        def clock() -> float:  # as if programs were ready: else the requests would pile up
            return time.perf_counter() - self.engine.programs.compile_seconds

        if self.engine.config.adaptive:
            longest = max(len(arrival.prompt) + arrival.new_tokens for arrival in self.arrivals)
            self.engine.warm_up([SamplingParams(temperature=self.temperature)], tokens=longest)
        self._drive(clock)
        self.engine.programs.sealed = True

    def run(self) -> LoadResult:
        """Run the workload, and measure. Raises RuntimeError if no request got a token."""
        engine = self.engine
        compiled, cache = engine.programs.compiled, engine.scheduler.cache_statistics()
        preempted, rounds = dict(engine.scheduler.preemptions), engine.shapes.rounds.copy()
        with DeviceWatch() as watch, _frequent_switches():
            engine.on_launch = watch.launched
            started = time.perf_counter()
            self._drive(time.perf_counter)
            engine.on_launch = None
        ends = [client.times[-1] for client in self.clients if client.times]
        if not ends:
            errors = {client.generation.error for client in self.clients}
            raise RuntimeError(f"no request got a token: {errors}")
        finished = max(ends)
        seconds, queries = finished - started, engine.scheduler.cache_statistics()
        looked, hits = queries[0] - cache[0], queries[1] - cache[1]
        return LoadResult(
            seconds=seconds,
            **self._tokens(seconds),
            **self._times(),
            **self._rounds(),
            **self._by_kind(started),
            device_idle=watch.idle(started, finished) / seconds,
            without_requests=self.without_requests / seconds,
            kv_waste=float(np.mean(self.usage.wastes)) if self.usage.wastes else 0.0,
            kv_used=self.usage.used,
            prompt_hits=hits / looked if looked else 0.0,
            prompt_hit_tokens=hits,
            preemptions={
                how: count - preempted[how] for how, count in engine.scheduler.preemptions.items()
            },
            rounds_by_shape=rounds_by_name(engine.shapes.rounds - rounds),
            compiled=engine.programs.compiled - compiled,
        )

    def _drive(self, clock: Callable[[], float]) -> None:
        """Add requests as they arrive, and step until all have ended."""
        salt = secrets.token_hex()  # the pages of other runs are not found
        engine, coming = self.engine, list(reversed(self.arrivals))
        self.clients, live = [], []
        self.usage, self.without_requests = _Usage(), 0.0
        started = clock()
        while coming or live:
            now = clock()
            while coming and started + coming[-1].time <= now:
                live.append(self._add(coming.pop(), started, salt))
            if live:
                engine.step()
                self.usage.look(engine, clock())
            elif engine.scheduler.is_idle:
                self.without_requests += _sleep(started + coming[-1].time - clock())
            else:
                engine.step()  # rows of the requests that have ended are released
            now = clock()
            for client in live:
                client.look(now)
            live = [client for client in live if not client.generation.done]
        while not engine.scheduler.is_idle:
            engine.step()

    def _add(self, arrival: Arrival, started: float, salt: str) -> Client:
        sampling = SamplingParams(
            temperature=self.temperature,
            seed=len(self.clients),
            max_tokens=arrival.new_tokens,
            stop_token_ids=(),
            cache_salt=salt,
            structured=ENDLESS if arrival.structured else None,
        )
        generation = self.engine.add(arrival.prompt, sampling)
        client = Client(started + arrival.time, generation)
        self.clients.append(client)
        return client

    # The figures.

    def _tokens(self, seconds: float) -> dict[str, Any]:
        good = sum(client.generation.finish_reason == "length" for client in self.clients)
        prompts = sum(len(client.generation.prompt) for client in self.clients)
        generated = sum(client.seen for client in self.clients)
        return {
            "requests": good,
            "failed": len(self.clients) - good,
            "prompt_tokens": prompts,
            "generated_tokens": generated,
            "generated_per_second": generated / seconds,
            "total_per_second": (prompts + generated) / seconds,
        }

    def _times(self) -> dict[str, Any]:
        clients = [client for client in self.clients if client.times]
        gaps = np.concatenate([np.diff(client.times) for client in clients])
        return {
            "first_token": percentiles([client.first_token for client in clients]),
            "between_tokens": percentiles([client.between_tokens for client in clients]),
            "between_deliveries": percentiles(gaps),
            "longest_gap": float(np.max(gaps, initial=0.0)),
        }

    def _by_kind(self, started: float) -> dict[str, Any]:
        """Figures of requests with a structured output, and of the others."""
        clients = [client for client in self.clients if client.times]
        structured = [client for client in clients if client.is_structured]
        others = [client for client in clients if not client.is_structured]
        seconds = max([client.times[-1] for client in others], default=started) - started
        tokens = sum(client.seen for client in others)
        return {
            "structured": sum(client.is_structured for client in self.clients),
            "unstructured_seconds": seconds,
            "unstructured_per_second": tokens / seconds if seconds else 0.0,
            "structured_between_tokens": percentiles(
                [client.between_tokens for client in structured]
            ),
            "unstructured_between_tokens": percentiles(
                [client.between_tokens for client in others]
            ),
        }

    def _rounds(self) -> dict[str, Any]:
        statistics = [client.generation.statistics for client in self.clients]
        rounds = sum(counts.rounds for counts in statistics)
        accepted = np.sum([counts.accepted for counts in statistics], axis=0)[1:]
        committed = sum(max(0, client.seen - 1) for client in self.clients)
        return {
            "tokens_per_round": committed / max(1, rounds),
            "accepted_by_depth": (accepted / max(1, rounds)).tolist(),
        }


def rounds_by_name(rounds: Mapping[TreeShape, int]) -> dict[str, int]:
    """The rounds by the names of their trees, smaller ones first."""
    shapes = sorted(rounds, key=lambda shape: (shape.num_nodes, shape.max_depth))
    return {shape.name: rounds[shape] for shape in shapes}


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    if not len(values):
        return {f"p{which}": 0.0 for which in PERCENTILES}
    found = np.percentile(values, PERCENTILES)
    return {f"p{which}": float(value) for which, value in zip(PERCENTILES, found, strict=True)}


def _sleep(seconds: float) -> float:
    started = time.perf_counter()
    time.sleep(max(0.0, seconds))
    return time.perf_counter() - started


@contextlib.contextmanager
def _frequent_switches() -> Iterator[None]:
    """Let DeviceWatch note at once that a call is ready, also while the host is busy planning."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
