"""Tokens and metrics."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from jaxspec import LLM
from jaxspec.serving import metrics as own_metrics
from tests.helpers.served import MODEL, with_http

OWN: Mapping[str, str] = MappingProxyType(
    {
        "kv_cache_waste_perc": "gauge",
        "device_idle_share": "gauge",
        "device_busy_seconds": "counter",
        "engine_failures": "counter",
        "programs_compiled": "counter",
        "rounds": "counter",
    }
)
OWN_LABELS: Mapping[str, set[str]] = MappingProxyType(
    {
        "num_requests_waiting_by_reason": {"reason"},
        "request_success": {"finished_reason"},
        "spec_decode_num_accepted_tokens_per_pos": {"position"},
        "rounds": {"shape"},
    }
)
# A sample of vLLM's buckets, which its dashboards may ask for.
BUCKETS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "time_to_first_token_seconds": (0.001, 0.02, 0.1, 0.75, 7.5, 640, 2560),
        "inter_token_latency_seconds": (0.01, 0.025, 0.075, 0.4, 2.5, 80),
        "request_time_per_output_token_seconds": (0.01, 0.025, 0.075, 0.4, 2.5, 80),
        "e2e_request_latency_seconds": (0.3, 0.8, 2.5, 15, 120, 1920, 7680),
        "request_queue_time_seconds": (0.3, 7680),
        "request_prompt_tokens": (1, 2, 5, 10, 200, 5000),
        "iteration_tokens_total": (1, 2, 5, 10, 200, 5000),
    }
)


def test_texts_are_tokenized_as_prompts_are(llm: LLM):
    async def test(http: httpx.AsyncClient) -> list[Any]:
        text = {"model": MODEL, "prompt": "añb", "return_token_strs": True}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        first = (await http.post("/tokenize", json=text)).json()
        second = (await http.post("/tokenize", json=chat)).json()
        back = (await http.post("/detokenize", json={"tokens": first["tokens"]})).json()
        return [first, second, back]

    first, second, back = with_http(llm, test)
    assert first["tokens"] == llm.tokenize(["añb"])[0] and first["count"] == 4
    assert first["token_strs"] == ["a", "\ufffd", "\ufffd", "b"]
    assert first["max_model_len"] == 256
    assert llm.detokenize(second["tokens"]) == "<user>hi<assistant>"
    assert back == {"prompt": "añb"}


def test_metrics_count_what_was_served(llm: LLM):
    async def test(http: httpx.AsyncClient) -> tuple[str, str]:
        body = {"prompt": "abcabcabc", "max_tokens": 12, "temperature": 0}
        before = (await http.get("/metrics")).text
        await http.post("/v1/completions", json=body)
        return before, (await http.get("/metrics")).text

    def value(text: str, name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"jaxspec:{name}{{")]
        return sum(float(line.split()[-1]) for line in lines)

    before, after = with_http(llm, test)
    assert value(before, "generation_tokens_total") == 0
    assert value(after, "generation_tokens_total") == 12
    assert value(after, "prompt_tokens_total") == 9
    assert value(after, "request_success_total") == 1
    assert 'finished_reason="length"' in after
    rounds = value(after, "spec_decode_num_drafts_total")
    accepted = value(after, "spec_decode_num_accepted_tokens_total")
    assert rounds > 0 and rounds + accepted >= 11
    assert value(after, "time_to_first_token_seconds_count") == 1
    assert value(after, "e2e_request_latency_seconds_count") == 1
    assert value(after, "num_requests_running") == 0
    assert value(after, "programs_compiled_total") > 0
    assert value(after, "rounds_total") >= rounds


def documented() -> dict[str, str]:
    """The types of all metrics by their names, as docs/serving.md tells: those of vLLM that apply,
    and ours. A counter's samples end in "_total", which its name leaves out, as the parser does."""
    text = (Path(__file__).parent.parent.parent / "docs" / "serving.md").read_text()
    _, section = text.split("### Metrics\n")
    found: dict[str, str] = {}
    rows = r"^\| (gauge|counter|histogram|its own)s? \| (.*) \|$"
    for kind, cell in re.findall(rows, section, re.MULTILINE):
        names = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cell))
        found |= {name: OWN[name] if kind == "its own" else kind for name in names}
    return found


def families(text: str) -> dict[str, Metric]:
    return {
        family.name.removeprefix("jaxspec:"): family
        for family in text_string_to_metric_families(text)
    }


def test_metrics_have_the_names_types_and_labels_of_vllms(llm: LLM):
    async def test(http: httpx.AsyncClient) -> tuple[str, str]:
        before = (await http.get("/metrics")).text
        body = {"prompt": "abcabcabc", "max_tokens": 12}
        options: list[dict[str, Any]] = [
            {"temperature": 0},
            {"n": 2, "logprobs": 1, "presence_penalty": 0.5},
            {"stream": True, "structured_outputs": {"regex": "[a-c]{3}"}},
            {"prompt": ["abcabcabcd", "x"], "max_tokens": 1},
        ]
        posts = [http.post("/v1/completions", json=body | one) for one in options]
        assert {answer.status_code for answer in await asyncio.gather(*posts)} == {200}
        return before, (await http.get("/metrics")).text

    for text in with_http(llm, test):
        found = {name: one for name, one in families(text).items() if "_created" not in name}
        assert {name: one.type for name, one in found.items()} == documented()
        for name, family in found.items():
            expected = {"model_name", "engine"} | OWN_LABELS.get(name, set())
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == expected, name
            assert family.samples, f"{name} is not there from the beginning"
    for name, wanted in BUCKETS.items():
        bounds = {float(sample.labels.get("le", 0)) for sample in found[name].samples}
        assert bounds >= set(wanted), name

    def total(name: str) -> float:
        """Of all samples that are counts."""
        samples = found[name].samples
        return sum(one.value for one in samples if one.name.endswith(("_total", "_count")))

    generated, prompts = total("generation_tokens"), total("prompt_tokens")
    assert total("request_success") == 6
    assert prompts == 9 * 4 + 10 + 1
    [steps] = [one.value for one in found["iteration_tokens_total"].samples if "_sum" in one.name]
    # The last token that the cache has is read once more.
    assert 0 <= steps - (prompts - total("prompt_tokens_cached") + generated) <= 6
    assert total("rounds") > 0 and total("iteration_tokens_total") > 1
    reasons = {one.labels["finished_reason"] for one in found["request_success"].samples}
    assert reasons == {*own_metrics.REASONS.values()}
