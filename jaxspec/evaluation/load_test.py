"""Runs a workload on engines as clients would, and measures what they and the device see."""

import contextlib
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.evaluation.benchmarks.workloads import Arrival
from jaxspec.evaluation.engine_load import (
    Arrivals,
    Client,
    DeviceWatch,
    EngineLoad,
    frequent_switches,
)
from jaxspec.scheduling.balancer import Balancer

PERCENTILES = (50, 90, 99)


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
      device_idle: share of the time in which no call was in flight; the mean of several engines,
        and so is ``without_requests``.
      without_requests: share of the time in which there was no request to run, either.
      kv_waste: mean share of the slots, in pages that hold tokens, without one.
      kv_used: largest share of the pages of an engine that requests held.
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


def _counted(engines: Iterable[Engine]) -> Counter[str | TreeShape]:
    """What engines have counted since they began: compiled programs, tokens that were looked up in
    the prefix cache, those that were found, preemptions by their kind, and rounds by their tree."""
    counts: Counter[str | TreeShape] = Counter()
    for engine in engines:
        looked, hits = engine.scheduler.cache_statistics()
        counts.update({"compiled": engine.programs.compiled, "looked": looked, "hits": hits})
        counts.update(engine.scheduler.preemptions)
        counts.update(engine.shapes.rounds)
    return counts


class LoadTest:
    """A workload on engines of the same model, each with devices of its own.

    Several engines are stepped by a thread each, and share the requests as those of ReplicatedLLM
    do: see scheduling.balancer.Balancer.

    Args:
      temperature: of all requests. Stop tokens do not end them, so that each has its length.
    """

    def __init__(
        self, engines: Sequence[Engine], arrivals: Sequence[Arrival], temperature: float = 0.0
    ):
        self.engines = tuple(engines)
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival.time)
        self.temperature = temperature
        self._loads = [
            EngineLoad(engine, number, temperature) for number, engine in enumerate(engines)
        ]

    @property
    def clients(self) -> list[Client]:
        """The clients of all requests, in the order of their arrival."""
        clients = [client for load in self._loads for client in load.clients]
        return sorted(clients, key=lambda client: client.arrived)

    def warm_up(self) -> None:
        """Compile, by running the workload; its pages are not found again. Then compile no more
        where a program is ready. An adaptive engine compiles for all its trees, and measures them,
        before that. Each of several engines runs the whole workload, as which requests it gets
        depends on time."""
        for load in self._loads:
            self._warm_up(load)

    def _warm_up(self, load: EngineLoad) -> None:
        engine = load.engine
        engine.programs.sealed = False

        def clock() -> float:  # as if programs were ready: else the requests would pile up
            return time.perf_counter() - engine.programs.compile_seconds

        if engine.config.adaptive:
            longest = max(len(arrival.prompt) + arrival.new_tokens for arrival in self.arrivals)
            engine.warm_up([SamplingParams(temperature=self.temperature)], tokens=longest)
        alone = EngineLoad(engine, 0, self.temperature)
        alone.drive(self._queue([engine]), clock(), clock, secrets.token_hex())
        engine.programs.sealed = True

    def run(self) -> LoadResult:
        """Run the workload, and measure. Raises RuntimeError if no request got a token."""
        before = _counted(self.engines)
        with contextlib.ExitStack() as watching:
            watches = [watching.enter_context(DeviceWatch()) for _ in self.engines]
            watching.enter_context(frequent_switches())
            for engine, watch in zip(self.engines, watches, strict=True):
                engine.on_launch = watch.launched
            started = time.perf_counter()
            self._drive(started)
            for engine in self.engines:
                engine.on_launch = None
        ends = [client.times[-1] for client in self.clients if client.times]
        if not ends:
            errors = {client.generation.error for client in self.clients}
            raise RuntimeError(f"no request got a token: {errors}")
        finished = max(ends)
        seconds = finished - started
        counts = _counted(self.engines) - before
        wastes = [waste for load in self._loads for waste in load.usage.wastes]
        idle = [watch.idle(started, finished) for watch in watches]
        return LoadResult(
            seconds=seconds,
            **self._tokens(seconds),
            **self._times(),
            **self._rounds(),
            **self._by_kind(started),
            device_idle=float(np.mean(idle)) / seconds,
            without_requests=float(np.mean([load.without_requests for load in self._loads]))
            / seconds,
            kv_waste=float(np.mean(wastes)) if wastes else 0.0,
            kv_used=max(load.usage.used for load in self._loads),
            prompt_hits=counts["hits"] / max(1, counts["looked"]),
            prompt_hit_tokens=counts["hits"],
            preemptions={how: counts[how] for how in self.engines[0].scheduler.preemptions},
            rounds_by_shape=rounds_by_name(
                {shape: count for shape, count in counts.items() if isinstance(shape, TreeShape)}
            ),
            compiled=counts["compiled"],
        )

    def _queue(self, engines: Sequence[Engine]) -> Arrivals:
        config, limits = engines[0].config, engines[0].limits
        balancer = Balancer.of(len(engines), config, limits.page_size, limits.num_pages)
        return Arrivals(self.arrivals, balancer, len(engines))

    def _drive(self, started: float) -> None:
        """Run the workload, each engine in a thread of its own if there are several."""
        arrivals, salt = self._queue(self.engines), secrets.token_hex()  # no pages of other runs
        if len(self._loads) == 1:
            self._loads[0].drive(arrivals, started, time.perf_counter, salt)
            return
        with ThreadPoolExecutor(len(self._loads), "engine") as threads:
            running = [
                threads.submit(load.drive, arrivals, started, time.perf_counter, salt)
                for load in self._loads
            ]
            for thread in running:
                thread.result()

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
