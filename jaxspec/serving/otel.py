"""Spans of requests for OpenTelemetry, with the names that vLLM gives them.

Only this module imports opentelemetry; it is loaded when a server is told to export spans.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxspec.llm.completion import Completion, generated_tokens
from jaxspec.serving.prepared import Ended, PreparedRequest
from jaxspec.serving.tracing import Spans

SPAN = "llm_request"
NANOSECONDS = 10**9


def spans_to(endpoint: str) -> "OtelSpans":
    """Spans that go to a collector, by OTLP over HTTP, such as http://localhost:4318/v1/traces."""
    return OtelSpans(BatchSpanProcessor(OTLPSpanExporter(endpoint)))


class OtelSpans(Spans):
    """A span for each request, ``llm_request``, whose parent is that of the client's headers.

    No prompt and no text is in them.
    """

    def __init__(self, processor: SpanProcessor):
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "jaxspec"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxspec")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str]) -> Ended:
        parent, started = self._propagator.extract(headers), time.time_ns()

        def end(prepared: PreparedRequest[Any, Any, Any], found: Sequence[Completion]) -> None:
            attributes = request_attributes(prepared) | answer_attributes(prepared, found)
            attributes["gen_ai.latency.e2e"] = (time.time_ns() - started) / NANOSECONDS
            span = self._tracer.start_span(
                SPAN, parent, SpanKind.SERVER, attributes=attributes, start_time=started
            )
            if any(completion.finish_reason == "error" for completion in found):
                span.set_status(Status(StatusCode.ERROR))
            span.end()

        return end

    def close(self) -> None:
        self._provider.shutdown()


def request_attributes(prepared: PreparedRequest[Any, Any, Any]) -> dict[str, Any]:
    """What was asked for, in vLLM's names and in those of the semantic conventions."""
    sampling, model = prepared.sampling[0], prepared.service.name
    return {
        "gen_ai.operation.name": prepared.operation,
        "gen_ai.provider.name": "jaxspec",
        "gen_ai.request.id": prepared.id,
        "gen_ai.request.model": prepared.request.model or model,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.max_tokens": int(sampling.max_tokens),
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.response.id": prepared.id,
        "gen_ai.response.model": model,
    }


def answer_attributes(
    prepared: PreparedRequest[Any, Any, Any], found: Sequence[Completion]
) -> dict[str, Any]:
    """What was written, and the seconds that it took; of several texts, from the first to begin to
    the last to end."""
    read = sum(len(completion.prompt_token_ids) for completion in found[:: prepared.samples])
    written = generated_tokens(found)
    queued = min(completion.queued for completion in found)
    arrived, first, finished = (
        choose(getattr(completion.timings, name) for completion in found)
        for choose, name in ((min, "arrived"), (min, "first_token"), (max, "finished"))
    )
    return {
        "gen_ai.usage.prompt_tokens": read,
        "gen_ai.usage.completion_tokens": written,
        "gen_ai.usage.input_tokens": read,
        "gen_ai.usage.output_tokens": written,
        "gen_ai.usage.cache_read.input_tokens": sum(
            completion.cached_tokens for completion in found[:: prepared.samples]
        ),
        "gen_ai.response.finish_reasons": [completion.finish_reason for completion in found],
        "gen_ai.latency.time_in_queue": queued,
        "gen_ai.latency.time_to_first_token": first - arrived,
        "gen_ai.latency.time_in_model_prefill": max(0.0, first - arrived - queued),
        "gen_ai.latency.time_in_model_decode": finished - first,
        "gen_ai.latency.time_in_model_inference": max(0.0, finished - arrived - queued),
    }
