"""Other weights while requests run: no text is of two versions, and each is what it is alone."""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.async_engine import AsyncEngine, Chunk
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.models.decoder import Decoder
from tests.helpers.compilations import Compilations
from tests.helpers.engines import FULL, new_engine, ready_engine, seal
from tests.helpers.random_models import random_prompts, random_target

PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 9, 2, 17, 12, 3), seed=6)]
SAMPLING = [SamplingParams(0.8 * (i % 2), seed=i, max_tokens=20) for i in range(6)]
STREAMED = [True, False, True, False, False, False]  # the first two pairs have rows

Texts = list[list[int]]


@functools.cache
def targets() -> tuple[Decoder, Decoder, Decoder]:
    """The engine's, and two others."""
    return random_target(), random_target(seed=5), random_target(seed=6)


@functools.cache
def shared() -> Engine:
    """Four rows, for six requests. Under the other targets its drafts are hardly accepted."""
    own = ready_engine("draft_model")
    own.watch.told = True
    return own


def engine(version: int = 0) -> Engine:
    own = shared()
    own.use_target(targets()[0], version=version)
    return own


@functools.cache
def expected(number: int) -> Texts:
    """The texts of fresh requests under one of the targets."""
    own = engine()
    own.use_target(targets()[number])
    return texts(own, own.add_all(PROMPTS, SAMPLING))


def texts(own: Engine, generations: Sequence[Generation]) -> Texts:
    own.finish(generations)
    return [generation.token_ids for generation in generations]


def versions(generations: Sequence[Generation]) -> list[int]:
    return [generation.version for generation in generations]


def begun(own: Engine, streams: Sequence[bool] = (False,) * 6, tokens: int = 4) -> list[Generation]:
    """Six requests, of which the first four run."""
    pairs = zip(PROMPTS, SAMPLING, streams, strict=True)
    generations = [own.add(prompt, way, streams=shown) for prompt, way, shown in pairs]
    while min(len(generation.token_ids) for generation in generations[:4]) < tokens:
        own.step(1)
    assert not any(generation.done for generation in generations)
    return generations


def test_those_that_run_finish_and_the_others_wait():
    old, new = expected(0), expected(1)
    own = engine()
    generations = begun(own)
    own.use_target(targets()[1], in_flight="finish")
    assert own.version == 0 and own.has_work
    later = own.add(PROMPTS[0], SAMPLING[0])
    assert texts(own, [*generations, later]) == [*old[:4], *new[4:], new[0]]
    assert versions([*generations, later]) == [0] * 4 + [1] * 3
    assert own.version == 1
    own._drain()
    assert not own.has_work


def test_those_that_run_begin_again():
    new = expected(1)
    own = engine()
    generations = begun(own)
    own.use_target(targets()[1], in_flight="restart")
    assert own.version == 1
    assert [generation.token_ids for generation in generations] == [[]] * 6
    assert [generation.restarts for generation in generations] == [1] * 4 + [0] * 2
    assert texts(own, generations) == new and versions(generations) == [1] * 6
    for generation in generations:
        counted = sum(generation.statistics.accepted[1:]) + generation.statistics.rounds + 1
        assert counted >= len(generation.token_ids) > generation.statistics.rounds
        times = generation.timings
        assert times is not None and times.arrived <= times.first_token <= times.finished


def test_what_was_shown_is_not_taken_back():
    old, new = expected(0), expected(1)
    own = engine()
    generations = begun(own, STREAMED)
    own.use_target(targets()[1], version=7, in_flight="restart")
    assert own.version == 0, "the streams still need the old weights"
    assert texts(own, generations) == [old[0], new[1], old[2], *new[3:]]
    assert versions(generations) == [0, 7, 0, 7, 7, 7]


def test_a_stream_that_has_not_begun_does_not_keep_the_old_weights():
    own = engine()
    streams = [own.add(PROMPTS[0], SAMPLING[0], streams=True)]
    own.use_target(targets()[1], in_flight="restart")
    assert own.version == 1 and texts(own, streams) == expected(1)[:1]


def test_the_last_weights_given_are_used_and_those_before_never():
    old, last = expected(0), expected(2)
    own = engine(version=3)
    generations = begun(own)
    own.use_target(targets()[1], in_flight="finish")
    own.use_target(targets()[2], in_flight="finish")
    assert texts(own, generations) == [*old[:4], *last[4:]]
    assert versions(generations) == [3] * 4 + [5] * 2
    generations = begun(own)
    own.use_target(targets()[1], in_flight="finish")
    own.use_target(targets()[0], version=2, in_flight="restart")
    assert own.version == 2 and texts(own, generations) == old


def test_a_drafter_changes_like_a_target_and_the_version_stays():
    old = expected(0)
    own = engine()
    drafter = own.params.drafter
    other = jax.tree.map(lambda leaf: leaf[..., ::-1], drafter)
    for in_flight in ("finish", "restart"):
        generations = begun(own)
        own.use_drafter(other, in_flight=in_flight)
        assert texts(own, generations) == old, "the text depends on the drafter"
        assert versions(generations) == [0] * 6
        own._drain()
        own.use_drafter(drafter)


def test_both_may_change_at_once():
    own = engine()
    drafter = own.params.drafter
    generations = begun(own)
    own.use_target(targets()[1], in_flight="finish")
    own.use_drafter(drafter, in_flight="restart")
    assert own.version == 1 and texts(own, generations) == expected(1)


def test_nothing_compiles_again(compilations: Compilations):
    own = engine()
    for in_flight in ("finish", "restart"):  # the first time may make the weights' own layouts
        for target in (1, 2):
            generations = begun(own, STREAMED)
            programs = own.programs.compiled
            del compilations[:]
            own.use_target(targets()[target], in_flight=in_flight)
            own.finish(generations)
            assert own.programs.compiled == programs and not compilations


def test_weights_are_not_copied():
    """So who gives them must not donate them meanwhile."""
    own, target = engine(), targets()[1]
    own.use_target(target)
    pairs = zip(jax.tree.leaves(own.params.target), jax.tree.leaves(target), strict=True)
    assert all(
        used.unsafe_buffer_pointer() == given.unsafe_buffer_pointer() for used, given in pairs
    )


def test_old_pages_are_not_found():
    own, prompt = engine(), [*range(1, 30)]
    greedy = SamplingParams(max_tokens=9)
    first = own.add(prompt, greedy)
    texts(own, [first])
    again = own.add(prompt, greedy)
    while not again.token_ids:
        own.step(1)
    own.use_target(targets()[1], in_flight="restart")
    own.finish([again])
    assert again.cached_tokens == 0 and again.token_ids != first.token_ids
    third = own.add(prompt, greedy)
    assert texts(own, [third]) == [again.token_ids] and third.cached_tokens > 0


def test_a_cancelled_request_lets_the_weights_change():
    own = engine()
    generations = begun(own)
    own.use_target(targets()[1], in_flight="finish")
    for generation in generations:
        own.cancel(generation)
    assert own.is_idle and own.has_work
    own.step()
    assert own.version == 1


def test_an_error_of_a_step_lets_the_weights_change():
    own = engine()
    generations = begun(own)
    own.use_target(targets()[1], in_flight="finish")

    def fail(calls: Any) -> None:
        raise OSError("no device")

    own.on_launch = fail
    with pytest.raises(OSError, match="no device"):
        own.step()
    own.on_launch = None
    assert {generation.finish_reason for generation in generations} == {"error"}
    assert own.version == 1
    assert texts(own, own.add_all(PROMPTS, SAMPLING)) == expected(1)


def test_a_deadline_holds_while_a_request_waits_for_weights():
    own = engine()
    generations = begun(own)
    own.use_target(targets()[1], in_flight="finish")
    late = own.add(PROMPTS[0], SAMPLING[0], timeout=0.0)
    own.finish([*generations, late])
    assert late.finish_reason == "timeout" and not late.token_ids


def test_what_is_refused():
    own = engine()
    generations = begun(own)
    with pytest.raises(RuntimeError, match="requests are under way"):
        own.use_target(targets()[1])
    with pytest.raises(RuntimeError, match="requests are under way"):
        own.forget_texts()
    with pytest.raises(ValueError, match="use one of refuse, finish, restart"):
        own.use_target(targets()[1], in_flight="mend")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="version must be an integer"):
        own.use_target(targets()[1], version="7", in_flight="restart")  # type: ignore[arg-type]
    target = targets()[1]
    with pytest.raises(ValueError, match="shape"):
        own.use_target(target.replace(embed=target.embed[:, 1:]), in_flight="restart")
    assert texts(own, generations) == expected(0) and own.version == 0


def test_chunks_are_taken_back_of_requests_that_do_not_stream():
    old, new = expected(0), expected(1)
    own = engine()

    async def chunks(serving: AsyncEngine, streams: bool, got: list[Chunk]) -> None:
        pairs = (PROMPTS[:2], SAMPLING[:2]) if streams else (PROMPTS[2:4], SAMPLING[2:4])
        async for chunk in serving.generate_all(*pairs, streams=streams):
            got.append(chunk)

    async def test() -> tuple[list[Chunk], list[Chunk]]:
        shown, others = [], []
        async with AsyncEngine(own, most_rounds=1) as serving, asyncio.TaskGroup() as group:
            group.create_task(chunks(serving, True, shown))
            group.create_task(chunks(serving, False, others))
            while not (shown and others):
                await asyncio.sleep(0)
            await serving.use_target(targets()[1], in_flight="restart")
            assert own.version == 1 and any(chunk.done for chunk in shown)
        return shown, others

    shown, others = asyncio.run(test())
    assert {chunk.restarts for chunk in shown} == {0}
    assert {chunk.restarts for chunk in others} == {0, 1}
    last = [chunk for chunk in others if chunk.restarts]
    for index in range(2):
        assert tokens_of(shown, index) == old[index]
        assert tokens_of(last, index) == new[2 + index]


def tokens_of(chunks: list[Chunk], index: int) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


@pytest.mark.slow
def test_preempted_requests_samples_and_logprobs_begin_again():
    own = seal(new_engine("ngram", num_pages=14, preemption="swap"), FULL)
    way = dataclasses.replace(FULL, max_tokens=30, n=2, stop_token_ids=(), ignore_eos=True)
    ways = [dataclasses.replace(way, seed=i) for i in range(4)]
    found: list[Any] = []
    for interrupted in (True, False):
        own.use_target(targets()[0 if interrupted else 1])
        preempted = own.scheduler.preemptions["swap"]
        generations = own.add_all(PROMPTS[:4], ways)
        while interrupted and own.scheduler.preemptions["swap"] == preempted:
            own.step(1)
        own.use_target(targets()[1], version=9, in_flight="restart")
        own.finish(generations)
        found.append([(one.token_ids, one.logprobs, one.prompt_logprobs) for one in generations])
        assert versions(generations) == [9] * 8
    assert found[0] == found[1] and own.swapped_bytes == 0
