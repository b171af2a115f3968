"""Prometheus metrics: vLLM's names where they mean the same, with the prefix ``jaxspec:``."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from jaxspec.engine.async_engine import Chunk
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.scheduling.plan import Delivery, Plan

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
FIRST_TOKEN += (10, 20, 40, 80, 160, 640, 2560)
BETWEEN_TOKENS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
BETWEEN_TOKENS += (1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
REQUEST += (1920, 7680)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = TOKENS[:13]  # up to 10,000
PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0)
# How requests end, by vLLM's names where it has one.
REASONS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("stop", "length", "error", "timeout")} | {"cancelled": "abort"}
)


class DeviceTime:
    """Seconds in which a call was in flight. A thread waits for the results of every call."""

    def __init__(self):
        self.busy = 0.0
        self.started = self._ready = time.perf_counter()
        self._calls: list[LaunchedCall] = []
        self._wake = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._wait, name="jaxspec device", daemon=True)
        self._thread.start()

    def launched(self, calls: list[LaunchedCall]) -> None:
        with self._wake:
            self._calls += calls
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join()

    @property
    def idle_share(self) -> float:
        """The share of the time since the start in which no call was in flight."""
        return max(0.0, 1 - self.busy / max(1e-9, time.perf_counter() - self.started))

    def _wait(self) -> None:
        while True:
            with self._wake:
                while not (self._calls or self._ended):
                    self._wake.wait()
                if self._ended:
                    return
                call = self._calls.pop(0)
            with contextlib.suppress(Exception):  # the engine tells of a call that failed
                jax.block_until_ready(call.emitted)
            ready = time.perf_counter()
            self.busy += ready - max(self._ready, call.launched)
            self._ready = ready


class Metrics:
    """What happens in an engine of a server, for `/metrics`.

    ``observe`` is AsyncEngine's on_chunk. What the engine counts itself is read when it is asked
    for.

    Attributes:
      members: those of all engines, in order; ``beside`` adds one.
    """

    def __init__(self, model: str, first: "Metrics | None" = None):
        self.registry = CollectorRegistry() if first is None else first.registry
        self.members: list[Metrics] = [] if first is None else first.members
        self._made: dict[str, Any] = {} if first is None else first._made  # by name
        self._model = model
        self._labels = {"model_name": model, "engine": str(len(self.members))}
        self.members.append(self)
        self._known: dict[str, float] = {}  # when a request's last chunk came
        self._engine_counts: dict[str, float] = {}
        self._device: DeviceTime | None = None
        self._watched: Engine | None = None
        self._request_metrics()
        self._engine_metrics()

    def beside(self) -> "Metrics":
        """The metrics of the next engine: the same names with another label."""
        return Metrics(self._model, self)

    def watch(self, engine: Engine) -> None:
        """Measure its calls, and how busy the device is. Belongs before the engine's first call."""
        self._device, self._watched = DeviceTime(), engine
        engine.on_launch, engine.on_read = self._device.launched, self._step
        for depth in range(engine.params.speculation.max_depth):
            self._by_depth.labels(**self._labels, position=str(depth))

    def close(self) -> None:
        """End what ``watch`` has begun."""
        if self._watched is not None:
            self._watched.on_launch = self._watched.on_read = None
        if self._device is not None:
            self._device.close()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = self._metric(Counter, name, text, *labels)
        if not labels:
            made.labels(**self._labels)  # it is there from the beginning, as 0
        return made

    def _gauge(self, name: str, text: str, **labels: str) -> Gauge:
        return self._metric(Gauge, name, text, *labels).labels(**self._labels, **labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = self._metric(Histogram, name, text, buckets=tuple(buckets))
        return made.labels(**self._labels)

    def _metric[T](
        self, kind: Callable[..., T], name: str, text: str, *labels: str, **more: Any
    ) -> T:
        """The engines share a metric, and have labels of their own."""
        if name not in self._made:
            names = (*self._labels, *labels)
            self._made[name] = kind(f"jaxspec:{name}", text, names, registry=self.registry, **more)
        return self._made[name]

    def _request_metrics(self) -> None:
        counter, histogram = self._counter, self._histogram
        self._success = counter("request_success", "requests that ended", "finished_reason")
        for reason in REASONS.values():
            self._success.labels(**self._labels, finished_reason=reason)
        self._prompt = counter("prompt_tokens", "tokens of prompts")
        self._cached = counter("prompt_tokens_cached", "of them, those whose KV was found")
        self._generated = counter("generation_tokens", "generated tokens")
        self._rejected = counter("admission_rejections", "requests refused as too many wait")
        self._rounds = counter("spec_decode_num_drafts", "rounds of draft and verification")
        self._drafted = counter("spec_decode_num_draft_tokens", "drafted tokens")
        self._accepted = counter("spec_decode_num_accepted_tokens", "accepted draft tokens")
        name, text = "spec_decode_num_accepted_tokens_per_pos", "rounds that accepted this depth"
        self._by_depth = counter(name, text, "position")
        self._first = histogram("time_to_first_token_seconds", "to the first token", FIRST_TOKEN)
        self._between = histogram(
            "inter_token_latency_seconds", "between outputs of a request", BETWEEN_TOKENS
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "mean of a request", BETWEEN_TOKENS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "of a request", REQUEST)
        self._queue = histogram("request_queue_time_seconds", "until a request had a row", REQUEST)
        self._prefill = histogram(
            "request_prefill_time_seconds", "from the row to the first token", REQUEST
        )
        self._decode = histogram("request_decode_time_seconds", "after the first token", REQUEST)
        self._inference = histogram("request_inference_time_seconds", "with a row", REQUEST)
        self._prompts = histogram("request_prompt_tokens", "of a request", TOKENS)
        self._lengths = histogram("request_generation_tokens", "of a request", TOKENS)
        self._preempted = histogram("request_num_preemptions", "of a request", PREEMPTIONS)

    def _engine_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "requests with a row")
        self._waiting = self._gauge("num_requests_waiting", "requests without a row")
        name, text = (
            "num_requests_waiting_by_reason",
            "deferred: for calls in flight, or KV to share",
        )
        self._capacity = self._gauge(name, text, reason="capacity")
        self._deferred = self._gauge(name, text, reason="deferred")
        self._usage = self._gauge("kv_cache_usage_perc", "share of the pages in use, 0 to 1")
        self._waste = self._gauge("kv_cache_waste_perc", "share of used slots without a token")
        self._idle = self._gauge("device_idle_share", "share of the time without a call in flight")
        self._steps = self._histogram(
            "iteration_tokens_total", "prompt and new tokens of a step", STEP_TOKENS
        )
        counter = self._counter
        self._busy = counter("device_busy_seconds", "seconds with a call in flight")
        self._queries = counter("prefix_cache_queries", "prompt tokens looked up")
        self._hits = counter("prefix_cache_hits", "of them, those that were found")
        self._preemptions = counter("num_preemptions", "requests that lost their row")
        self._failures = counter("engine_failures", "steps that failed, and ended all requests")
        self._compiled = counter("programs_compiled", "programs that were compiled or loaded")
        text = "rounds by draft tree: nodes, depth and children"
        self._shapes = counter("rounds", text, "shape")

    def _step(self, plan: Plan, deliveries: list[Delivery]) -> None:
        """What an engine read and generated in a step, of one call or several."""
        read = sum(read.count for read in plan.reads)
        self._steps.observe(read + sum(len(delivery.tokens) for delivery in deliveries))

    def rejected(self) -> None:
        """A request was refused, as too many wait."""
        self._rejected.labels(**self._labels).inc()

    def observe(self, chunk: Chunk) -> None:
        """New tokens of a request, or its end. Called in the engine's thread."""
        now, key = time.perf_counter(), chunk.generation.request_id
        if chunk.token_ids:
            self._generated.labels(**self._labels).inc(len(chunk.token_ids))
            if key in self._known:
                self._between.observe(now - self._known[key])
            else:
                self._prompt.labels(**self._labels).inc(len(chunk.generation.prompt))
                self._cached.labels(**self._labels).inc(chunk.generation.cached_tokens)
            self._known[key] = now
        if chunk.done:
            self._known.pop(key, None)
            self._ended(chunk)

    def _ended(self, chunk: Chunk) -> None:
        generation, labels = chunk.generation, self._labels
        statistics, times = generation.statistics, generation.timings
        prompt, tokens = len(generation.prompt), len(generation.token_ids)
        self._success.labels(**labels, finished_reason=REASONS[str(chunk.finish_reason)]).inc()
        self._rounds.labels(**labels).inc(statistics.rounds)
        self._drafted.labels(**labels).inc(statistics.drafted)
        self._accepted.labels(**labels).inc(sum(statistics.accepted[1:]))
        for depth, count in enumerate(statistics.accepted[1:]):
            self._by_depth.labels(**labels, position=str(depth)).inc(count)
        self._prompts.observe(prompt)
        self._lengths.observe(tokens)
        self._preempted.observe(generation.preemptions)
        assert times is not None
        self._e2e.observe(times.finished - times.arrived)
        if not tokens or generation.waited is None:
            return
        queue = min(generation.waited, times.prefill)
        self._first.observe(times.prefill)
        self._queue.observe(queue)
        self._prefill.observe(times.prefill - queue)
        self._decode.observe(times.decode)
        self._inference.observe(times.prefill - queue + times.decode)
        self._per_token.observe(times.decode / max(1, tokens - 1))

    def read(self, engine: Engine) -> None:
        """Take what the engine counts. Called in its thread."""
        usage, scheduler = engine.scheduler.usage(), engine.scheduler
        self._running.set(scheduler.num_running)
        waiting, deferred = scheduler.num_waiting, scheduler.num_deferred
        self._waiting.set(waiting)
        self._capacity.set(waiting - deferred)
        self._deferred.set(deferred)
        self._usage.set(usage.used)
        self._waste.set(usage.waste)
        queries, hits = scheduler.cache_statistics()
        self._advance("queries", self._queries, queries)
        self._advance("hits", self._hits, hits)
        self._advance("preemptions", self._preemptions, sum(scheduler.preemptions.values()))
        self._advance("compiled", self._compiled, engine.programs.compiled)
        if self._device is not None:
            self._idle.set(self._device.idle_share)
            self._advance("busy", self._busy, self._device.busy)
        counted = dict.fromkeys(engine.shapes.known, 0) | engine.shapes.rounds
        for shape, rounds in counted.items():
            self._advance(f"rounds {shape.name}", self._shapes, rounds, shape=shape.name)

    def failed(self, times: int) -> None:
        """How often steps of the engine have failed so far."""
        self._advance("failures", self._failures, times)

    def _advance(self, key: str, counter: Counter, value: float, **labels: str) -> None:
        """Bring a counter to the engine's own count, which begins anew after an error."""
        before = self._engine_counts.get(key, 0.0)
        counter.labels(**self._labels, **labels).inc(value - before if value >= before else value)
        self._engine_counts[key] = value

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
