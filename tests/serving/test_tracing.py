"""Spans of requests, in the names of vLLM and of the semantic conventions."""

from typing import Any

import httpx
import pytest

from jaxspec import LLM
from tests.helpers.served import MODEL, with_http

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from jaxspec.serving.otel import OtelSpans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
USER = {"role": "user", "content": "secret"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_tells_what_a_request_was(llm: LLM, stream: bool):
    kept = InMemorySpanExporter()
    spans = OtelSpans(SimpleSpanProcessor(kept))
    body = {"model": MODEL, "max_tokens": 5, "temperature": 0.5, "stream": stream}

    async def test(http: httpx.AsyncClient) -> list[int]:
        several: dict[str, Any] = {"prompt": "abcabc", "n": 2, "ignore_eos": True}
        answers = [
            await http.post("/v1/completions", json={**body, **several}),
            await http.post(
                "/v1/chat/completions",
                json={**body, "messages": [USER]},
                headers={"traceparent": PARENT},
            ),
            await http.post("/v1/completions", json={**body, "prompt": ""}),
        ]
        return [answer.status_code for answer in answers]

    assert with_http(llm, test, spans=spans) == [200, 200, 400]
    spans.close()
    texts, chat = kept.get_finished_spans()
    assert (texts.name, chat.name, texts.kind) == ("llm_request", "llm_request", SpanKind.SERVER)
    assert texts.parent is None and chat.parent is not None
    assert f"{chat.parent.trace_id:x}" == PARENT.split("-")[1].lstrip("0")
    assert texts.attributes is not None and chat.attributes is not None
    found: dict[str, Any] = dict(texts.attributes)
    latencies = {name: found.pop(name) for name in list(found) if "latency" in name}
    assert found.pop("gen_ai.request.id") == found.pop("gen_ai.response.id")
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxspec",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.prompt_tokens": 6,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    prefix = "gen_ai.latency.time_"
    assert latencies.keys() == {
        *(f"{prefix}in_queue", f"{prefix}to_first_token", "gen_ai.latency.e2e"),
        *(f"{prefix}in_model_{part}" for part in ("prefill", "decode", "inference")),
    }
    e2e = latencies["gen_ai.latency.e2e"]
    assert all(0 <= seconds <= e2e for seconds in latencies.values())
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert "secret" not in f"{texts.to_json()}{chat.to_json()}"
