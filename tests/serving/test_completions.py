"""`/v1/completions`, through OpenAI's own client."""

import asyncio
import json
from typing import Any

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.llm.async_llm import AsyncLLM
from tests.helpers.served import (
    MODEL,
    TEMPLATE,
    Served,
    ask,
    idle_pages,
    run,
    with_client,
    with_http,
)

PROMPT = "abcabcabcabc"
USER = {"role": "user", "content": "abcabc"}
SAMPLED = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0.8, "seed": 3}


def test_a_text_is_that_of_the_library(llm: LLM):
    [expected] = llm.generate([PROMPT], SamplingParams(temperature=0.8, seed=3, max_tokens=20))
    [answer] = ask(llm, {**SAMPLED, "extra_body": {"return_speculation": True}})
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert answer.model == MODEL and answer.id.startswith("cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 20, 32)
    assert choice.speculation["rounds"] == expected.num_rounds
    assert choice.speculation["acceptance_by_depth"] == expected.acceptance_by_depth


def test_usage_counts_all_that_was_generated_for_the_best(llm: LLM):
    """Of two prompts: three samples of each, of which one comes back."""
    request = {**SAMPLED, "prompt": [PROMPT, "xyz"], "max_tokens": 7}
    [answer] = ask(llm, {**request, "n": 1, "best_of": 3, "extra_body": {"ignore_eos": True}})
    usage = answer.usage
    assert len(answer.choices) == 2
    assert (usage.prompt_tokens, usage.completion_tokens) == (12 + 3, 2 * 3 * 7)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_repeated_prompt_is_found_in_the_cache(llm: LLM):
    request = {"model": MODEL, "prompt": "x" * 41, "max_tokens": 1, "temperature": 0}
    answers = ask(llm, request, request)
    assert [one.usage.prompt_tokens_details.cached_tokens for one in answers] == [0, 40]


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["a", "\n"]}, {"n": 2, "echo": True}])
def test_a_stream_is_the_whole_answer_in_pieces(llm: LLM, more: dict[str, Any]):
    request = {**SAMPLED, "prompt": ["abcabc", "xyz"], **more}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    whole, chunks = ask(llm, request, {**request, **stream})
    texts, reasons = [""] * len(whole.choices), [[] for _ in whole.choices]
    *chunks, last = chunks
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
    assert len(texts) == 2 * more.get("n", 1) and len(set(texts)) == len(texts)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_of_the_text_and_of_an_echoed_prompt(llm: LLM):
    request = {**SAMPLED, "logprobs": 1}
    answer, chunks = ask(llm, {**request, "echo": True}, {**request, "stream": True})
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    [choice] = answer.choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None and len(found.tokens) == 32
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert found.text_offset[:3] == [0, 1, 2]
    assert found.text_offset == sorted(found.text_offset)
    assert all(
        choice.text.startswith(token, place)
        for token, place in zip(found.tokens, found.text_offset, strict=True)
        if "\ufffd" not in token  # the others begin where the character does
    )
    places = [place for one in streamed if one for place in one.text_offset]
    assert [12 + place for place in places] == found.text_offset[12:]
    assert all(1 <= len(top) <= 2 for top in found.top_logprobs[1:])
    tokens = [token for one in streamed if one for token in one.tokens]
    assert tokens == found.tokens[12:]


def test_parts_of_characters_have_their_bytes_and_places(llm: LLM):
    """Characters of four tokens, each of a byte."""
    body = {"structured_outputs": {"regex": "[😀🚀]{4}"}}
    fields = {"model": MODEL, "max_tokens": 16, "seed": 1, "extra_body": body}
    asked = {"messages": [{"role": "user", "content": "😀"}], "logprobs": True}
    completion = {"prompt": "😀", "echo": True, "logprobs": 0}
    chat, text = (one.choices[0] for one in ask(llm, asked | fields, completion | fields))
    entries = [bytes(entry.bytes) for entry in chat.logprobs.content]
    assert len(entries) == 16 and b"".join(entries).decode() == chat.message.content
    assert text.logprobs.text_offset == [place for place in range(5) for _ in range(4)]


def test_a_stop_string_ends_the_text_and_may_be_kept(llm: LLM):
    [whole] = ask(llm, SAMPLED)
    whole = whole.choices[0].text
    stop = whole[5:7]
    body = {"include_stop_str_in_output": True}
    answers = ask(llm, {**SAMPLED, "stop": stop}, {**SAMPLED, "stop": stop, "extra_body": body})
    cut, kept = (answer.choices[0] for answer in answers)
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    assert kept.text == cut.text + stop


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_of_the_request_has_ended_a_text_is_told(llm: LLM, path: str, stream: bool):
    prompt = {"prompt": PROMPT} if path == "completions" else {"messages": [USER]}
    request = {**prompt, "max_tokens": 12, "temperature": 0, "stream": stream, "model": MODEL}

    def choice(**more: Any) -> dict[str, Any]:
        answer = with_http(llm, lambda http: http.post(f"/v1/{path}", json={**request, **more}))
        if not stream:
            return answer.json()["choices"][0]
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        assert len({chunk["system_fingerprint"] for chunk in chunks}) == 1
        choices = [chunk["choices"][0] for chunk in chunks]
        assert all(one["stop_reason"] is None for one in choices[:-1])
        return choices[-1]

    def ends_with(**more: Any) -> tuple[str, Any]:
        ended = choice(**more)
        return ended["finish_reason"], ended["stop_reason"]

    [text] = (
        llm.generate([PROMPT], SamplingParams(max_tokens=12))
        if path == "completions"
        else (llm.chat([[USER]], SamplingParams(max_tokens=12), chat_template=TEMPLATE))
    )
    token, letter = text.token_ids[3], text.text[-1]
    assert ends_with() == ("length", None)
    assert ends_with(stop_token_ids=[token]) == ("stop", token)
    assert ends_with(stop=["nothing like it", letter]) == ("stop", letter)
    [end] = llm.params.target.config.stop_token_ids
    certain = {"logit_bias": {str(end): 100}}
    assert ends_with(**certain, stop_token_ids=[token, end]) == ("stop", None)


def test_prompts_may_be_token_ids(llm: LLM):
    [ids] = llm.tokenize([PROMPT])
    fields = {**SAMPLED, "extra_body": {"return_token_ids": True}}
    prompts = [PROMPT, ids, [PROMPT, PROMPT], [ids, ids]]
    answers = ask(llm, *({**fields, "prompt": prompt} for prompt in prompts))
    choices = [choice for answer in answers for choice in answer.choices]
    assert len(choices) == 6 and len({choice.text for choice in choices}) == 1
    assert all(choice.prompt_token_ids == ids for choice in choices)


def test_the_text_is_that_of_plain_decoding(llm: LLM, plain_byte_llm: LLM):
    async def test(client: Any) -> list[str]:
        requests = [SAMPLED, {**SAMPLED, "temperature": 0}, {**SAMPLED, "n": 3, "top_p": 0.9}]
        answers = await asyncio.gather(*(client.completions.create(**one) for one in requests))
        return [choice.text for answer in answers for choice in answer.choices]

    assert with_client(llm, test) == with_client(plain_byte_llm, test)


def test_a_client_that_goes_away_frees_its_pages(llm: LLM):
    async def test() -> None:
        async with Served(llm) as server, server.client() as client:
            request = {**SAMPLED, "max_tokens": 200}
            stream = await client.completions.create(**request, stream=True)
            await anext(aiter(stream))
            task = asyncio.create_task(client.completions.create(**request))
            await asyncio.sleep(0.05)
            await stream.close()
            task.cancel()
            serving = server.service.llm
            assert isinstance(serving, AsyncLLM)
            for _ in range(200):
                if await serving.run(lambda engine: engine.is_idle):
                    break
                await asyncio.sleep(0.02)
            assert await serving.run(lambda engine: engine.is_idle)

    run(test())
    assert idle_pages(llm)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_bad_words_stay_out_of_the_text(llm: LLM, path: str):
    prompt = {"prompt": PROMPT} if path == "completions" else {"messages": [USER]}
    request = {**prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}

    def tokens(**more: Any) -> list[int]:
        answer = with_http(llm, lambda http: http.post(f"/v1/{path}", json={**request, **more}))
        return answer.json()["choices"][0]["token_ids"]

    def words_of(text: list[int]) -> set[str]:
        """Parts of a text, of two tokens each, that its tokenizer writes so."""
        pairs = [text[place : place + 2] for place in range(len(text) - 1)]
        words = {llm.detokenize(pair): pair for pair in pairs}
        encode = llm.tokenizer.encode
        return {
            word for word, pair in words.items() if word.strip() == word and encode(word) == pair
        }

    free = tokens()
    words = sorted(words_of(free))
    assert words and not words_of(tokens(bad_words=words)) & set(words)
    assert tokens(bad_words=["\u00e9\u00e8\u00ea"]) == free
