"""Every option of SamplingParams through LLM, equal to plain decoding."""

import dataclasses
from typing import Any

import pytest

from jaxspec import LLM, Completion, SamplingParams, TextChunk

PROMPTS = ["def f(x):", "hello", "class A:"]
GREEDY = SamplingParams(max_tokens=40)
WARM = SamplingParams(temperature=1.0, max_tokens=40, seed=5)


@pytest.fixture(scope="module")
def llm(byte_llm: LLM) -> LLM:
    return byte_llm


@pytest.fixture(scope="module")
def plain(plain_byte_llm: LLM) -> LLM:
    return plain_byte_llm


def stream(llm: LLM, prompts: list[str], sampling: Any) -> tuple[list[TextChunk], list[Completion]]:
    events = list(llm.stream(prompts, sampling))
    chunks = [event for event in events if isinstance(event, TextChunk)]
    return chunks, [event for event in events if isinstance(event, Completion)]


def inner(text: str, start: int) -> str:
    """Three characters of a text whose tokenizer has a token for each byte."""
    return next(text[i : i + 3] for i in range(start, len(text)) if "\ufffd" not in text[i : i + 3])


def stops_of(llm: LLM) -> list[tuple[str, SamplingParams, str]]:
    """Texts, and how to stop each at the three characters that follow."""
    found = []
    for completion in llm.generate(PROMPTS, GREEDY):
        stop = inner(completion.text, 9)
        found.append((completion.text, dataclasses.replace(GREEDY, stop=("never", stop)), stop))
    return found


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(llm: LLM, plain: LLM):
    wanted = stops_of(plain)
    sampling = [params for _, params, _ in wanted]
    found, one = llm.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling)
    for (text, _, stop), completion, alone in zip(wanted, found, one, strict=True):
        assert completion.text == text[: text.index(stop)] == alone.text
        assert completion.finish_reason == "stop" and completion.error is None
        assert completion.token_ids == alone.token_ids and len(completion.token_ids) < 40
        assert str(llm.tokenizer.decode(completion.token_ids)).endswith(stop)
    assert llm.engine.is_idle


def test_a_stream_never_shows_a_part_of_a_stop_string(llm: LLM):
    wanted = stops_of(llm)
    chunks, ends = stream(llm, PROMPTS, [params for _, params, _ in wanted])
    for index, (text, _, stop) in enumerate(wanted):
        shown = [chunk for chunk in chunks if chunk.index == index]
        joined = "".join(chunk.text for chunk in shown)
        assert joined == text[: text.index(stop)]
        assert [c.text for c in ends].count(joined) >= 1
        tokens = [token for chunk in shown for token in chunk.token_ids]
        assert tokens in [c.token_ids for c in ends]
    assert all(completion.finish_reason == "stop" for completion in ends)


def test_what_may_have_become_a_stop_string_comes_at_the_end(llm: LLM):
    [whole] = llm.generate(["hello"], GREEDY)
    stop = whole.text[-2:] + "x"
    chunks, [end] = stream(llm, ["hello"], dataclasses.replace(GREEDY, stop=stop))
    assert end.text == whole.text == "".join(chunk.text for chunk in chunks)
    assert end.finish_reason == "length"


def test_samples_follow_one_another(llm: LLM, plain: LLM):
    two = dataclasses.replace(WARM, n=2)
    found = llm.generate(["hello", "a", "hello"], [two, GREEDY, dataclasses.replace(two, seed=9)])
    assert [completion.seed for completion in found[:2]] == [5, 6]
    assert [completion.seed for completion in found[3:]] == [9, 10]
    alone = plain.generate(["hello"] * 2, [WARM, dataclasses.replace(WARM, seed=6)])
    assert [completion.text for completion in found[:2]] == [one.text for one in alone]
    chunks, ends = stream(llm, ["hello", "a"], [two, GREEDY])
    for index, wanted in enumerate(found[:3]):
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == wanted.text
    assert {end.text for end in ends} == {one.text for one in found[:3]}


def test_the_best_samples_come_back(llm: LLM):
    every = llm.generate(["hello"], dataclasses.replace(WARM, n=4, logprobs=1))
    found = llm.generate(["hello"], dataclasses.replace(WARM, n=2, best_of=4))
    sums = [sum(one.logprob for one in sample.logprobs or ()) for sample in every]
    assert sums == [sample.cumulative_logprob for sample in every]
    order = sorted(range(4), key=lambda index: -sums[index])
    assert [one.token_ids for one in found] == [every[index].token_ids for index in order[:2]]
    assert all(one.logprobs is None and one.cumulative_logprob is not None for one in found)
    left_out = sum(len(every[index].token_ids) for index in order[2:])
    assert [one.left_out_tokens for one in found] == [left_out, 0]
    with pytest.raises(ValueError, match="best_of cannot be streamed"):
        next(llm.stream(["hello"], dataclasses.replace(WARM, n=2, best_of=4)))


def test_logprobs_end_with_the_text(llm: LLM):
    [whole] = llm.generate(["hello"], dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1))
    assert [one.token_id for one in whole.logprobs or ()] == whole.token_ids
    prompt = whole.prompt_logprobs or []
    assert [one and one.token_id for one in prompt] == [None, *whole.prompt_token_ids[1:]]
    stop = inner(whole.text, 9)
    [cut] = llm.generate(["hello"], dataclasses.replace(GREEDY, logprobs=2, stop=stop))
    assert cut.logprobs == (whole.logprobs or [])[: len(cut.token_ids)]
