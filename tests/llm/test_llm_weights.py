"""Other weights while texts are generated: which are taken back, and which are not."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.completion import Completion, TextChunk
from jaxspec.models.decoder import Decoder
from tests.helpers.marks import slow

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
LIST = StructuredOutput(regex="[a-f]{3}(, [0-9]{2}){2,6}")
SAMPLING = [
    LONG,
    SamplingParams(temperature=0.8, seed=3, max_tokens=150, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=60, structured=LIST),
]
PROMPTS = ["abcabcabc", "hello", "abc, 12, 12"]


@pytest.fixture(scope="module")
def targets(byte_llm: LLM) -> tuple[Decoder, Decoder]:
    old = byte_llm.params.target
    return old, old.replace(embed=jnp.roll(old.embed, 1, axis=0))


@pytest.fixture
def llm(byte_llm: LLM, targets: tuple[Decoder, Decoder]) -> Any:
    """With the first of the targets, before and after the test."""
    byte_llm.use_target(targets[0], version=0)
    yield byte_llm
    byte_llm.use_target(targets[0], version=0)


def made(completion: Completion) -> tuple[Any, ...]:
    return completion.text, completion.token_ids, completion.logprobs, completion.finish_reason


def fresh(llm: LLM, target: Decoder, index: int | None = None) -> list[tuple[Any, ...]]:
    """What requests get under a target, all or one."""
    llm.use_target(target, version=0)
    these = slice(None) if index is None else slice(index, index + 1)
    return [made(each) for each in llm.generate(PROMPTS[these], SAMPLING[these])]


def up_to_rounding(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """What equals the same with log-probabilities that differ by at most 1e-5."""
    text, ids, logprobs, reason = found

    def near(token: TokenLogprob) -> tuple[Any, ...]:
        top = tuple((other, pytest.approx(value, abs=1e-5)) for other, value in token.top)
        return token.token_id, pytest.approx(token.logprob, abs=1e-5), top

    return text, ids, logprobs and [near(token) for token in logprobs], reason


def run[T](test: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(100):
            return await test

    return asyncio.run(limited())


async def until_begun(serving: AsyncLLM, requests: int) -> None:
    """Until so many have tokens. Calls of few rounds let others in between."""

    def begun(engine: Engine) -> bool:
        running = engine.scheduler.begun
        return len(running) == requests and not any(each.is_new for each in running)

    while not await serving.run(begun):
        await asyncio.sleep(0)


@pytest.mark.parametrize("in_flight", ["restart", pytest.param("repair", marks=pytest.mark.slow)])
def test_texts_that_nobody_saw_are_made_anew(
    llm: LLM, targets: tuple[Decoder, Decoder], in_flight: Any
):
    old, new = (fresh(llm, target) for target in targets)
    assert all(one != other for one, other in zip(old, new, strict=True))
    llm.use_target(targets[0], version=0)

    async def test() -> tuple[list[Completion], list[int]]:
        counts: list[int] = []
        async with AsyncLLM(llm, most_rounds=1) as serving:
            texts = asyncio.create_task(
                serving.generate(PROMPTS, SAMPLING, on_tokens=counts.append)
            )
            await until_begun(serving, 3)
            await serving.use_target(targets[1], in_flight=in_flight)
            assert await serving.run(lambda engine: engine.version) == 1
            return await texts, counts

    completions, counts = run(test())
    if in_flight == "repair":  # the passes that verified were wider, so sums were rounded otherwise
        new = [up_to_rounding(each) for each in new]
    assert [made(each) for each in completions] == new
    assert [each.version for each in completions] == [1] * 3
    assert sum(counts) > sum(len(each.token_ids) for each in completions)


def test_a_stop_string_of_a_text_that_was_taken_back_ends_nothing(
    llm: LLM, targets: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch
):
    """The engine is told to end it after the weights have changed."""
    [(before, *_)] = fresh(llm, targets[0], 0)
    [(text, *_)] = fresh(llm, targets[1], 0)
    stop = next(before[i : i + 3] for i in range(20, 190) if before[i : i + 3] not in text)
    sampling = SamplingParams(max_tokens=200, ignore_eos=True, stop=(stop,))
    llm.use_target(targets[0], version=0)

    async def test() -> list[Completion]:
        async with AsyncLLM(llm, most_rounds=1) as serving:
            end, late = serving.engine.end, []

            def held(*arguments: Any) -> None:
                late.append(arguments)

            monkeypatch.setattr(serving.engine, "end", held)
            texts = asyncio.create_task(serving.generate(PROMPTS[:1], sampling))
            while not late and not texts.done():
                await asyncio.sleep(0)
            assert late, "the text ended without its stop string"
            await serving.engine.pause()
            await serving.run(lambda engine: engine.use_target(targets[1], in_flight="restart"))
            for arguments in late:
                end(*arguments)
            await serving.engine.pause(False)
            return await texts

    [completion] = run(test())
    assert completion.text == text and completion.finish_reason == "length"


# By default requests restart in the tests above.
@pytest.mark.parametrize("in_flight", [slow("restart"), "finish"])
def test_a_stream_ends_under_the_weights_that_it_began_with(
    llm: LLM, targets: tuple[Decoder, Decoder], in_flight: Any
):
    old, new = (fresh(llm, target) for target in targets)
    llm.use_target(targets[0], version=0)

    async def test() -> tuple[list[Any], list[Completion], list[Completion]]:
        async with AsyncLLM(llm, most_rounds=1) as serving:
            texts = asyncio.create_task(serving.generate(PROMPTS[1:2], SAMPLING[1:2]))
            stream = serving.stream(PROMPTS[:1], SAMPLING[:1])
            events = [await anext(stream)]
            await until_begun(serving, 2)
            changing = asyncio.create_task(serving.use_target(targets[1], in_flight=in_flight))
            while await serving.run(lambda engine: engine.weights.pending is None):
                await asyncio.sleep(0)
            later = asyncio.create_task(serving.generate(PROMPTS[2:], SAMPLING[2:]))
            assert not changing.done()
            events += [event async for event in stream]
            await changing
            return events, await texts, await later

    (*chunks, streamed), [text], [later] = run(test())
    assert made(streamed) == old[0] and streamed.version == 0
    shown = [chunk for chunk in chunks if isinstance(chunk, TextChunk)]
    assert "".join(chunk.text for chunk in shown) == streamed.text
    assert {chunk.version for chunk in shown} == {0}
    version = 1 if in_flight == "restart" else 0
    assert made(text) == (old, new)[version][1] and text.version == version
    assert made(later) == new[2] and later.version == 1


def test_a_stream_of_an_llm_goes_on_under_its_weights(llm: LLM, targets: tuple[Decoder, Decoder]):
    old, new = (fresh(llm, target, 0) for target in targets)
    llm.use_target(targets[0], version=0)
    stream = llm.stream(PROMPTS[:1], SAMPLING[:1])
    first = next(stream)
    with pytest.raises(RuntimeError, match="requests are under way"):
        llm.use_target(targets[1])
    llm.use_target(targets[1], in_flight="restart")
    *_, completion = [first, *stream]
    assert isinstance(completion, Completion) and made(completion) == old[0]
    [after] = llm.generate(PROMPTS[:1], SAMPLING[0])
    assert made(after) == new[0]
    assert (completion.version, after.version) == (0, 1)
