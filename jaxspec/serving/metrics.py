"""Prometheus metrics: vLLM's names where they mean the same, with the prefix ``jaxspec:``."""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxspec.engine.async_engine import Chunk
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
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
LABELS = ("model_name", "engine")  # of all metrics
BY_DEPTH = "spec_decode_num_accepted_tokens_per_pos"
WAITING = "num_requests_waiting_by_reason"
# How requests end, by vLLM's names where it has one.
REASONS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("stop", "length", "error", "timeout", "abort")}
    | {"cancelled": "abort"}
)
# What each metric is, or the buckets of a histogram; what it says; its label beside LABELS.
METRICS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "request_success": (Counter, "requests that ended", "finished_reason"),
        "prompt_tokens": (Counter, "tokens of prompts"),
        "prompt_tokens_cached": (Counter, "of them, those whose KV was found"),
        "generation_tokens": (Counter, "generated tokens"),
        "admission_rejections": (Counter, "requests refused as too many wait"),
        "spec_decode_num_drafts": (Counter, "rounds of draft and verification"),
        "spec_decode_num_draft_tokens": (Counter, "drafted tokens"),
        "spec_decode_num_accepted_tokens": (Counter, "accepted draft tokens"),
        BY_DEPTH: (Counter, "rounds that accepted this depth", "position"),
        "time_to_first_token_seconds": (FIRST_TOKEN, "to the first token"),
        "inter_token_latency_seconds": (BETWEEN_TOKENS, "between outputs of a request"),
        "request_time_per_output_token_seconds": (BETWEEN_TOKENS, "mean of a request"),
        "e2e_request_latency_seconds": (REQUEST, "of a request"),
        "request_queue_time_seconds": (REQUEST, "until a request had a row"),
        "request_prefill_time_seconds": (REQUEST, "from the row to the first token"),
        "request_decode_time_seconds": (REQUEST, "after the first token"),
        "request_inference_time_seconds": (REQUEST, "with a row"),
        "request_prompt_tokens": (TOKENS, "of a request"),
        "request_generation_tokens": (TOKENS, "of a request"),
        "request_num_preemptions": (PREEMPTIONS, "of a request"),
        "num_requests_running": (Gauge, "requests with a row"),
        "num_requests_waiting": (Gauge, "requests without a row"),
        WAITING: (Gauge, "deferred: for calls in flight, or KV to share", "reason"),
        "kv_cache_usage_perc": (Gauge, "share of the pages in use, 0 to 1"),
        "kv_cache_waste_perc": (Gauge, "share of used slots without a token"),
        "device_idle_share": (Gauge, "share of the time without a call in flight"),
        "iteration_tokens_total": (STEP_TOKENS, "prompt and new tokens of a step"),
        "device_busy_seconds": (Counter, "seconds with a call in flight"),
        "prefix_cache_queries": (Counter, "prompt tokens looked up"),
        "prefix_cache_hits": (Counter, "of them, those that were found"),
        "num_preemptions": (Counter, "requests that lost their row"),
        "engine_failures": (Counter, "steps that failed, and ended all requests"),
        "programs_compiled": (Counter, "programs that were compiled or loaded"),
        "rounds": (Counter, "rounds by draft tree: nodes, depth and children", "shape"),
    }
)


class DeviceTime:
    """Seconds in which a call was in flight. A thread waits for the results of every call."""

    def __init__(self):
        self.busy = 0.0
        self.started = self._ready = time.perf_counter()
        self._calls: queue.SimpleQueue[LaunchedCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="jaxspec device", daemon=True)
        self._thread.start()

    def launched(self, calls: list[LaunchedCall]) -> None:
        for call in calls:
            self._calls.put(call)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    @property
    def idle_share(self) -> float:
        """The share of the time since the start in which no call was in flight."""
        return max(0.0, 1 - self.busy / max(1e-9, time.perf_counter() - self.started))

    def _wait(self) -> None:
        while (call := self._calls.get()) is not None:
            with contextlib.suppress(Exception):  # the engine tells of a call that failed
                jax.block_until_ready(call.emitted)
            ready = time.perf_counter()
            self.busy += ready - max(self._ready, call.launched)
            self._ready = ready


def _registered(registry: CollectorRegistry) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, text, *labels) in METRICS.items():
        options = {"labelnames": (*LABELS, *labels), "registry": registry}
        if isinstance(kind, tuple):
            kind, options["buckets"] = Histogram, kind
        found[name] = kind(f"jaxspec:{name}", text, **options)
    return found


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
        # The engines share the metrics, and have labels of their own.
        self._all = _registered(self.registry) if first is None else first._all
        self._model, self._engine = model, str(len(self.members))
        self.members.append(self)
        self._known: dict[str, float] = {}  # when a request's last chunk came
        self._engine_counts: dict[tuple[str, ...], float] = {}
        self._device: DeviceTime | None = None
        self._watched: Engine | None = None
        for name, (_, _, *labels) in METRICS.items():
            if not labels:
                self._of(name)  # it is there from the beginning, as 0
        for reason in REASONS.values():
            self._of("request_success", reason)
        for reason in ("capacity", "deferred"):
            self._of(WAITING, reason)

    def beside(self) -> "Metrics":
        """The metrics of the next engine: the same names with another label."""
        return Metrics(self._model, self)

    def watch(self, engine: Engine) -> None:
        """Measure its calls, and how busy the device is. Belongs before the engine's first call."""
        self._device, self._watched = DeviceTime(), engine
        engine.on_launch, engine.on_read = self._device.launched, self._step
        for depth in range(engine.params.speculation.max_depth):
            self._of(BY_DEPTH, str(depth))

    def close(self) -> None:
        """End what ``watch`` has begun."""
        if self._watched is not None:
            self._watched.on_launch = self._watched.on_read = None
        if self._device is not None:
            self._device.close()

    def _of(self, name: str, *label: str) -> Any:
        """A metric of this engine; ``label``: the value of its further label."""
        return self._all[name].labels(self._model, self._engine, *label)

    def _step(self, plan: Plan, deliveries: list[Delivery]) -> None:
        """What an engine read and generated in a step, of one call or several."""
        read = sum(read.count for read in plan.reads)
        new = sum(len(delivery.tokens) for delivery in deliveries)
        self._of("iteration_tokens_total").observe(read + new)

    def rejected(self) -> None:
        """A request was refused, as too many wait."""
        self._of("admission_rejections").inc()

    def observe(self, chunk: Chunk) -> None:
        """New tokens of a request, or its end. Called in the engine's thread."""
        now, key = time.perf_counter(), chunk.generation.request_id
        if chunk.token_ids:
            self._of("generation_tokens").inc(len(chunk.token_ids))
            if key in self._known:
                self._of("inter_token_latency_seconds").observe(now - self._known[key])
            else:
                self._of("prompt_tokens").inc(len(chunk.generation.prompt))
                self._of("prompt_tokens_cached").inc(chunk.generation.cached_tokens)
            self._known[key] = now
        if chunk.done:
            self._known.pop(key, None)
            self._of("request_success", REASONS[str(chunk.finish_reason)]).inc()
            self._ended(chunk.generation)

    def _ended(self, generation: Generation) -> None:
        statistics, times = generation.statistics, generation.timings
        tokens = len(generation.token_ids)
        self._of("spec_decode_num_drafts").inc(statistics.rounds)
        self._of("spec_decode_num_draft_tokens").inc(statistics.drafted)
        self._of("spec_decode_num_accepted_tokens").inc(sum(statistics.accepted[1:]))
        for depth, count in enumerate(statistics.accepted[1:]):
            self._of(BY_DEPTH, str(depth)).inc(count)
        assert times is not None
        found = {
            "request_prompt_tokens": len(generation.prompt),
            "request_generation_tokens": tokens,
            "request_num_preemptions": generation.preemptions,
            "e2e_request_latency_seconds": times.finished - times.arrived,
        }
        if tokens and generation.waited is not None:
            queue = min(generation.waited, times.prefill)
            found |= {
                "time_to_first_token_seconds": times.prefill,
                "request_queue_time_seconds": queue,
                "request_prefill_time_seconds": times.prefill - queue,
                "request_decode_time_seconds": times.decode,
                "request_inference_time_seconds": times.prefill - queue + times.decode,
                "request_time_per_output_token_seconds": times.decode / max(1, tokens - 1),
            }
        for name, value in found.items():
            self._of(name).observe(value)

    def read(self, engine: Engine) -> None:
        """Take what the engine counts. Called in its thread."""
        scheduler, usage = engine.scheduler, engine.scheduler.usage()
        self._of("num_requests_running").set(scheduler.num_running)
        self._of("num_requests_waiting").set(scheduler.num_waiting)
        self._of(WAITING, "capacity").set(scheduler.num_waiting - scheduler.num_deferred)
        self._of(WAITING, "deferred").set(scheduler.num_deferred)
        self._of("kv_cache_usage_perc").set(usage.used)
        self._of("kv_cache_waste_perc").set(usage.waste)
        queries, hits = scheduler.cache_statistics()
        self._advance("prefix_cache_queries", queries)
        self._advance("prefix_cache_hits", hits)
        self._advance("num_preemptions", sum(scheduler.preemptions.values()))
        self._advance("programs_compiled", engine.programs.compiled)
        if self._device is not None:
            self._of("device_idle_share").set(self._device.idle_share)
            self._advance("device_busy_seconds", self._device.busy)
        counted = dict.fromkeys(engine.shapes.known, 0) | engine.shapes.rounds
        for shape, rounds in counted.items():
            self._advance("rounds", rounds, shape.name)

    def failed(self, times: int) -> None:
        """How often steps of the engine have failed so far."""
        self._advance("engine_failures", times)

    def _advance(self, name: str, value: float, *label: str) -> None:
        """Bring a counter to the engine's own count, which begins anew after an error."""
        before = self._engine_counts.get((name, *label), 0.0)
        self._of(name, *label).inc(value - before if value >= before else value)
        self._engine_counts[name, *label] = value

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
