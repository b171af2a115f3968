"""AsyncEngine: each task gets its own text, whatever the others do."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import random
import resource
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.engine.engine import Engine
from jaxspec.scheduling.plan import QueueFull
from tests.helpers.engines import ready_engine
from tests.helpers.random_models import random_prompts

PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 9, 2, 17), seed=6)]
GREEDY = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=50)
MAX_QUEUE = 50


def new_engine(max_rows: int, max_queue: int | None = None) -> Engine:
    """A small engine whose programs are compiled; of four rows they are test_engine.py's."""
    return ready_engine(max_rows=max_rows, max_queue=max_queue)


@functools.cache
def engine() -> Engine:
    """One engine for the tests: each closes its AsyncEngine, so that nobody else uses it."""
    return new_engine(max_rows=4, max_queue=MAX_QUEUE)


def run[T](test: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(300):  # a lost request fails its test, and does not stop it
            return await test

    return asyncio.run(limited())


async def text(serving: AsyncEngine, *request: Any, **options: Any) -> list[int]:
    """All tokens of a request that must end by its length."""
    tokens, ends = [], []
    async for chunk in serving.generate(*request, **options):
        tokens += chunk.token_ids
        ends.append(chunk.finish_reason)
        assert chunk.done == (chunk.finish_reason is not None)
    assert ends == [None] * (len(ends) - 1) + ["length"]
    return tokens


async def killed(serving: AsyncEngine, after: float, *request: Any) -> None:
    """Run a request in a task that is cancelled after some seconds."""
    task = asyncio.create_task(text(serving, *request))
    await asyncio.sleep(after)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def alone(own: Engine, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    generations = own.add_all(prompts, sampling)
    own.finish(generations)
    own._drain()
    return [generation.token_ids for generation in generations]


def check_pages(own: Engine) -> None:
    """Nothing is left to do, and every page is free, or kept for others."""
    usage = own.scheduler.usage()
    assert own.is_idle and own.scheduler.is_idle and usage.free + usage.idle == usage.total


def test_texts_are_those_of_the_engine_alone():
    expected = alone(engine(), PROMPTS, [GREEDY] * 4)

    async def together() -> list[list[int]]:
        async with AsyncEngine(engine()) as serving:
            return await asyncio.gather(*(text(serving, prompt, GREEDY) for prompt in PROMPTS))

    assert run(together()) == expected
    check_pages(engine())


async def many(own: Engine, count: int, seed: int) -> tuple[int, dict[int, list[int]]]:
    """Requests of which a tenth is killed; how many were, and the texts of the others."""
    rng = random.Random(seed)
    victims = set(rng.sample(range(count), count // 10))
    texts: dict[int, list[int]] = {}

    async def one(serving: AsyncEngine, index: int) -> None:
        await asyncio.sleep(rng.random() * count / 400)
        if index in victims:
            await killed(serving, rng.random() * count / 400, *request(index))
        else:
            texts[index] = await text(serving, *request(index))

    async with AsyncEngine(own) as serving:
        await asyncio.gather(*(one(serving, index) for index in range(count)))
        assert not serving._requests
    return len(victims), texts


def request(index: int) -> tuple[list[int], SamplingParams]:
    rng = np.random.default_rng(index)
    prompt = rng.integers(96, size=rng.integers(1, 24)).tolist()
    sampling = SamplingParams(0.8 * (index % 2), seed=index, max_tokens=int(rng.integers(2, 40)))
    return prompt, sampling


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_none_is_lost_or_mixed_up_when_a_tenth_is_killed(count: int):
    own = engine() if count == 20 else new_engine(max_rows=64)
    requests = [request(index) for index in range(count)]
    expected = alone(own, *map(list, zip(*requests, strict=True)))
    run(many(own, count, seed=0))  # so that all that grows once has grown
    gc.collect()
    before, compiled = resident(), own.programs.compiled
    num_killed, texts = run(many(own, count, seed=1))
    gc.collect()
    assert len(texts) == count - num_killed
    assert all(texts[index] == expected[index] for index in texts)
    assert own.programs.compiled == compiled
    check_pages(own)
    assert resident() - before < 32 << 20


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_the_pages_of_a_cancelled_task_are_free_in_the_next_plan(how: str):
    async def test() -> None:
        async with AsyncEngine(engine(), most_rounds=1) as serving:
            other = serving.generate(PROMPTS[1], LONG)
            await anext(other)
            if how == "close":
                stream = serving.generate(PROMPTS[0], LONG)
                await anext(stream)
                await stream.aclose()
            else:
                task = asyncio.create_task(text(serving, PROMPTS[0], LONG))
                while await serving.run(lambda own: own.scheduler.num_running) < 2:
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
            assert await serving.run(lambda own: own.scheduler.num_running) == 1
            before = await serving.run(lambda own: own.scheduler.usage())
            await other.aclose()
            await asyncio.sleep(0.1)
            after = await serving.run(lambda own: own.scheduler.usage())
            assert after.free + after.idle == after.total > before.free + before.idle

    run(test())


def test_bad_requests_and_a_full_queue_are_raised_to_the_caller():
    async def test() -> None:
        async with AsyncEngine(engine(), most_rounds=1) as serving:
            with pytest.raises(ValueError, match="prompt"):
                await text(serving, [], GREEDY)
            with pytest.raises(ValueError, match="stop strings need the text"):
                await text(serving, PROMPTS[0], dataclasses.replace(GREEDY, stop=("x",)))
            running = [serving.generate(PROMPTS[0], LONG) for _ in range(4)]
            for stream in running:
                await anext(stream)
            waiting = [
                asyncio.create_task(text(serving, PROMPTS[1], GREEDY)) for _ in range(MAX_QUEUE)
            ]
            await asyncio.sleep(0)  # they are now in the queue
            with pytest.raises(QueueFull, match=f"max_queue={MAX_QUEUE}"):
                await text(serving, PROMPTS[2], GREEDY)
            for stream in running:
                await stream.aclose()
            assert len({tuple(tokens) for tokens in await asyncio.gather(*waiting)}) == 1

    run(test())


def test_an_error_of_the_engine_ends_its_requests_and_the_next_one_works():
    own = engine()
    expected = alone(own, PROMPTS, [GREEDY] * 4)

    def fail(own: Engine) -> None:
        def broken(calls: object) -> None:
            own.on_launch = None
            raise RuntimeError("no such luck")

        own.on_launch = broken

    async def test() -> None:
        async with AsyncEngine(own, most_rounds=1) as serving:
            streams = [serving.generate(prompt, LONG) for prompt in PROMPTS[:2]]
            for stream in streams:
                await anext(stream)
            await serving.run(fail)
            for stream in streams:
                *_, last = [chunk async for chunk in stream]
                assert last.done and last.finish_reason == "error"
                assert "RuntimeError: no such luck" in str(last.error)
            assert await text(serving, PROMPTS[0], GREEDY) == expected[0]

    run(test())
    check_pages(own)


def test_the_thread_sleeps_while_there_is_nothing_to_do():
    async def test() -> float:
        async with AsyncEngine(engine()) as serving:
            await text(serving, PROMPTS[0], GREEDY)
            before = time.process_time()
            await asyncio.sleep(0.5)
            return time.process_time() - before

    assert run(test()) < 0.1


def test_closing_ends_what_is_under_way():
    async def test() -> None:
        serving = AsyncEngine(engine())
        stream = serving.generate(PROMPTS[0], LONG)
        await anext(stream)
        await serving.close()
        *_, last = [chunk async for chunk in stream]
        assert last.finish_reason == "cancelled"
        assert not serving._thread.is_alive()
        await serving.close()  # does nothing
        with pytest.raises(RuntimeError, match="closed"):
            await text(serving, PROMPTS[0], GREEDY)

    run(test())
    check_pages(engine())


def test_a_closed_event_loop_cancels_its_requests():
    """As when asyncio.run is left without waiting for the generators' ends."""
    serving = AsyncEngine(engine(), most_rounds=1)

    async def leave() -> None:
        await anext(serving.generate(PROMPTS[0], LONG))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()

    async def after() -> list[int]:
        async with serving:
            return await text(serving, PROMPTS[1], GREEDY)

    assert len(run(after())) == 20
    check_pages(engine())
