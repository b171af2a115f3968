"""Tokens and metrics."""

from typing import Any

from jaxspec import LLM
from tests.served import MODEL, Served, run


def test_texts_are_tokenized_as_prompts_are(llm: LLM):
    async def test() -> list[Any]:
        async with Served(llm) as server, server.http() as http:
            text = {"model": MODEL, "prompt": "añb", "return_token_strs": True}
            chat = {"messages": [{"role": "user", "content": "hi"}]}
            first = (await http.post("/tokenize", json=text)).json()
            second = (await http.post("/tokenize", json=chat)).json()
            back = (await http.post("/detokenize", json={"tokens": first["tokens"]})).json()
            return [first, second, back]

    first, second, back = run(test())
    assert first["tokens"] == llm.tokenize(["añb"])[0] and first["count"] == 4
    assert first["token_strs"] == ["a", "\ufffd", "\ufffd", "b"]
    assert first["max_model_len"] == 256
    assert llm.detokenize(second["tokens"]) == "<user>hi<assistant>"
    assert back == {"prompt": "añb"}


def test_metrics_count_what_was_served(llm: LLM):
    async def test() -> tuple[str, str]:
        async with Served(llm) as server, server.http() as http:
            body = {"prompt": "abcabcabc", "max_tokens": 12, "temperature": 0}
            before = (await http.get("/metrics")).text
            await http.post("/v1/completions", json=body)
            return before, (await http.get("/metrics")).text

    def value(text: str, name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"jaxspec:{name}{{")]
        return sum(float(line.split()[-1]) for line in lines)

    before, after = run(test())
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
