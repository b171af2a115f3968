"""Requests of lm-evaluation-harness (`local-completions` of 0.4.13), as its client reads them."""

from typing import Any

import httpx
import pytest

from jaxspec import LLM, SamplingParams
from tests.helpers.served import MODEL, with_http

WORDS = ["abcabcabc", "xyzxy"]


def scored(llm: LLM, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    """The choices of a request for log-probabilities: a batch of prompts as token ids."""
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}

    async def test(http: httpx.AsyncClient) -> httpx.Response:
        fields = body | {"seed": 1234, "echo": True} | more
        return await http.post("/v1/completions", json=fields)

    answer = with_http(llm, test)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


def parsed(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """(log-probability of what follows the context, whether greedy decoding would write it)."""
    found = choice["logprobs"]
    values = found["token_logprobs"][context:-1]  # the last one is that of the new token
    tops = found["top_logprobs"][context:-1]
    return sum(values), all(
        value == max(top.values()) for value, top in zip(values, tops, strict=True)
    )


def test_a_batch_is_scored_by_log_probabilities(llm: LLM):
    prompts = llm.tokenize(WORDS)
    first, second = (
        parsed(choice, context)
        for choice, context in zip(scored(llm, prompts), (4, 3), strict=True)
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for found, completion, context in zip(
        (first, second), llm.generate(prompts, sampling), (4, 3), strict=True
    ):
        assert completion.prompt_logprobs is not None
        entries = [entry for entry in completion.prompt_logprobs[context:] if entry is not None]
        assert found[0] == pytest.approx(sum(entry.logprob for entry in entries))
        assert found[1] == all(entry.top[0][0] == entry.token_id for entry in entries)


def test_what_the_model_writes_is_greedy(llm: LLM):
    [prompt] = llm.tokenize(WORDS[:1])
    [text] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=5))
    [choice] = scored(llm, [prompt + text.token_ids])
    value, greedy = parsed(choice, len(prompt))
    assert greedy and value < 0
    other = [*text.token_ids[:-1], (text.token_ids[-1] + 1) % 64]
    [choice] = scored(llm, [prompt + other])
    assert not parsed(choice, len(prompt))[1]


@pytest.mark.parametrize("tokens", [0, 1])
def test_scores_do_not_depend_on_the_token_after_the_text(llm: LLM, tokens: int):
    """Were the entry of a stop token left out, the text's last one would be cut off for it."""
    [prompt] = llm.tokenize(WORDS[:1])
    [free] = scored(llm, [prompt])
    stop = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))[0].token_ids
    [ended] = scored(llm, [prompt], stop_token_ids=stop, max_tokens=tokens)
    assert ended["finish_reason"] == ("stop" if tokens else "length")
    assert ended["text"] == WORDS[0] and free["text"].startswith(WORDS[0])
    found, expected = (choice["logprobs"]["token_logprobs"] for choice in (ended, free))
    assert found == expected[: len(prompt) + tokens] and len(expected) == len(prompt) + 1
    assert parsed(free, 4) == (pytest.approx(sum(expected[4 : len(prompt)])), False)


def test_texts_of_a_batch_end_at_strings_and_the_tokenizer_is_the_servers(llm: LLM):
    async def test(http: httpx.AsyncClient) -> tuple[dict[str, Any], ...]:
        info = (await http.get("/tokenizer_info")).json()
        bare = {"prompt": WORDS[0], "add_special_tokens": False}
        ids = (await http.post("/tokenize", json=bare)).json()["tokens"]
        whole, cut = [
            (await http.post("/v1/completions", json={"model": MODEL, **body})).json()
            for body in (
                {"prompt": [ids, ids[:5]], "max_tokens": 16, "temperature": 0, "seed": 1234},
                {"prompt": [ids, ids[:5]], "max_tokens": 16, "temperature": 0, "seed": 1234,
                 "stop": ["b", "\n\n", "<|endoftext|>"]},
            )
        ]  # fmt: skip
        return info, {"ids": ids}, whole, cut

    info, bare, whole, cut = with_http(llm, test)
    assert bare["ids"] == llm.tokenize(WORDS[:1], special=False)[0]
    assert info["eos_token"] == llm.tokenizer.eos_token and "<user>" not in info["chat_template"]
    for full, ended in zip(whole["choices"], cut["choices"], strict=True):
        assert ended["text"] == full["text"].split("b")[0] and ended["index"] == full["index"]


def test_no_token_is_asked_for_with_echo_alone(llm: LLM):
    async def test(http: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"model": MODEL, "prompt": WORDS[0], "max_tokens": 0}
        more = [{"echo": True, "logprobs": 1}, {}, {"echo": True, "stream": True}]
        return [await http.post("/v1/completions", json=body | each) for each in more]

    echoed, *refused = with_http(llm, test)
    assert echoed.json()["usage"]["completion_tokens"] == 0
    assert [answer.status_code for answer in refused] == [400, 400]
    assert refused[0].json()["error"]["param"] == "max_tokens"
