"""Several engines behind one server, each on a device of its own."""

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import openai
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.commands import generate
from jaxspec.commands.generate import prompt_file as batch
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.completion import Completion, TextChunk
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.parallel import replica_meshes
from tests.helpers.engines import tiny_llm
from tests.helpers.marks import slow
from tests.helpers.served import MODEL, Served, idle_pages, run

PROMPTS = ["abcabcabc", "hello", "xyxyxy", "once upon", "a", "bbbb"]
PARAMS = [
    SamplingParams(max_tokens=12 + index, temperature=0.8 * (index % 2), seed=index)
    for index in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def replicas(model: Path, llm: LLM) -> list[LLM]:
    """The engine that other tests have, too, and one more on the next device."""
    return [llm, tiny_llm(model, mesh=replica_meshes(2)[1])]


def devices(llm: LLM) -> set[int]:
    return {device.id for device in llm.params.target.embed.devices()}


def value(metrics: str, name: str, engine: int) -> float:
    found = re.findall(rf'^jaxspec:{name}{{engine="{engine}".*}} (.*)$', metrics, re.MULTILINE)
    return sum(map(float, found))


def test_each_has_devices_of_its_own():
    ids = [[one.id for one in mesh.devices.flat] for mesh in replica_meshes(3, 2) if mesh]
    assert ids == [[0, 1], [2, 3], [4, 5]]
    assert replica_meshes(1) == [None]
    with pytest.raises(ValueError, match="tp 4, dp 3, sp 1 needs 12 devices, this process has 8"):
        replica_meshes(3, 4)
    with pytest.raises(ValueError, match="must be >= 1, got tp 1, dp 0"):
        replica_meshes(0)


def test_texts_are_those_of_one_engine(replicas: list[LLM]):
    expected = replicas[0].generate(PROMPTS, PARAMS)

    async def test() -> tuple[list[Completion], list[Any], str]:
        async with Served(replicas[0], replicas[1:]) as server, server.http() as http:
            own = server.service.llm
            together = await own.generate(PROMPTS, PARAMS)
            events = [event async for event in own.stream(PROMPTS, PARAMS)]
            return together, events, (await http.get("/metrics")).text

    assert [devices(one) for one in replicas] == [{0}, {1}]
    together, events, metrics = run(test())
    assert [one.text for one in together] == [one.text for one in expected]
    completions = [event for event in events if isinstance(event, Completion)]
    assert [one.text for one in completions] == [one.text for one in expected]
    for index, one in enumerate(expected):
        chunks = [event for event in events if isinstance(event, TextChunk)]
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == one.text
    # Both worked, and /metrics tells them apart.
    tokens = [value(metrics, "generation_tokens_total", engine) for engine in (0, 1)]
    assert min(tokens) > 0 and sum(tokens) == 2 * sum(len(one.token_ids) for one in expected)
    assert all(value(metrics, "programs_compiled_total", engine) > 0 for engine in (0, 1))


def test_a_file_of_prompts_is_done_by_all(
    replicas: list[LLM], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[Any] = []

    def make_llm(arguments: Any, drafter: str, tokenizer: Any, mesh: Any, _: Any) -> LLM:
        loaded.append(mesh)
        return replicas[len(loaded) - 1]

    monkeypatch.setattr(batch, "make_llm", make_llm)
    lines, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines.write_text(
        "".join(json.dumps({"prompt": one, "seed": 7}) + "\n" for one in PROMPTS)
        + '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'
    )
    before = [one.engine.scheduler.cache_statistics()[0] for one in replicas]
    options = ["--max-tokens", "9", "--temperature", "0.8", "--no-compilation-cache", "--dp", "2"]
    files = ["--prompt-file", str(lines), "--out", str(out)]
    assert generate.main(["--model", str(model), *files, *options]) == 0
    assert [sorted(one.id for one in mesh.devices.flat) for mesh in loaded] == [[0], [1]]
    read = [one.engine.scheduler.cache_statistics()[0] for one in replicas]
    assert all(after > earlier for earlier, after in zip(before, read, strict=True))
    *own, openai_line = map(json.loads, out.read_text().splitlines())
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=9, seed=7)
    expected = [replicas[0].generate([prompt], params)[0].text for prompt in PROMPTS]
    assert [one["text"] for one in own] == expected
    assert openai_line["response"]["status_code"] == 200


def test_samples_stay_together_and_in_order(replicas: list[LLM]):
    params = [
        SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=2),
        SamplingParams(max_tokens=9, temperature=1.0, seed=2, n=2, best_of=3),
        SamplingParams(max_tokens=10),
    ]
    expected = replicas[0].generate(PROMPTS[:3], params)

    async def test() -> tuple[list[Completion], list[Any]]:
        async with ReplicatedLLM([AsyncLLM(one) for one in replicas]) as own:
            streamed = [params[0], params[2], params[0]]
            with pytest.raises(ValueError, match="best_of"):
                await anext(own.stream(PROMPTS[:3], params))
            completions = await own.generate(PROMPTS[:3], params)
            return completions, [one async for one in own.stream(PROMPTS[:3], streamed)]

    completions, events = run(test())
    assert [one.text for one in completions] == [one.text for one in expected]
    last = [event for event in events if isinstance(event, Completion)]
    assert [one.text for one in last[:2]] == [one.text for one in expected[:2]]
    assert len(last) == 5 and len(last[2].token_ids) == 10
    for index, one in enumerate(last):
        chunks = [event for event in events if isinstance(event, TextChunk)]
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == one.text


def test_a_conversation_stays_where_its_beginning_is_cached(replicas: list[LLM]):
    async def test() -> list[int]:
        async with Served(replicas[0], replicas[1:]) as server, server.client() as client:
            cached = []
            for text in ("a conversation that goes on and on ", "and another one that does, too "):
                for turn in range(3):
                    prompt = text * (turn + 1)
                    own = await client.completions.create(
                        model=MODEL, prompt=prompt, max_tokens=4, temperature=0
                    )
                    cached.append(own.usage.prompt_tokens_details.cached_tokens)
            return cached

    cached = run(test())
    assert cached[0] == cached[3] == 0 and all(cached[turn] >= 24 for turn in (1, 2, 4, 5))


def test_a_stream_that_is_closed_frees_the_pages_of_all(replicas: list[LLM]):
    async def test() -> list[int]:
        async with ReplicatedLLM([AsyncLLM(one) for one in replicas]) as own:
            stream = own.stream(PROMPTS, SamplingParams(max_tokens=200))
            await anext(stream)
            under_way = list(own.balancer.requests)
            await stream.aclose()
            async with asyncio.timeout(20):
                while not all(map(idle_pages, replicas)):
                    await asyncio.sleep(0.01)
            assert own.balancer.requests == [0, 0] and own.balancer.tokens == [0, 0]
            return under_way

    assert run(test()) == [3, 3]


def test_all_get_other_weights_under_one_version(replicas: list[LLM]):
    old = replicas[0].params.target
    new = old.replace(embed=jnp.roll(old.embed, 1, axis=0))
    expected = [[one.text for one in replicas[0].generate(PROMPTS, PARAMS)]]
    replicas[0].use_target(new, version=3)
    expected.append([one.text for one in replicas[0].generate(PROMPTS, PARAMS)])
    replicas[0].use_target(old, version=3)

    async def test() -> list[list[Completion]]:
        async with ReplicatedLLM([AsyncLLM(one, most_rounds=1) for one in replicas]) as own:
            under_way = asyncio.create_task(own.generate(PROMPTS, PARAMS))
            for one in own.replicas:
                while not await one.run(lambda engine: engine.scheduler.begun):
                    await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="requests are under way"):
                await own.use_target(new)
            await own.use_target(new, version=7, in_flight="finish")
            found = [await under_way, await own.generate(PROMPTS, PARAMS)]
            await own.use_target(old)
            await own.use_drafter(replicas[0].params.drafter)
            return [*found, await own.generate(PROMPTS, PARAMS)]

    first, second, third = run(test())
    assert [one.text for one in second] == expected[1]
    assert {one.version for one in second} == {7} and {one.version for one in third} == {8}
    for one, *texts in zip(first, *expected, strict=True):
        assert one.text == texts[one.version == 7]
    assert [one.text for one in third] == expected[0]


# What it costs to repair is compiling; an engine alone restarts in test_weights_in_motion.py.
@pytest.mark.parametrize("in_flight", ["restart", slow("repair")])
def test_all_begin_again_under_other_weights(replicas: list[LLM], in_flight: Any):
    old, version = replicas[0].params.target, 1 + max(one.engine.version for one in replicas)
    new = old.replace(embed=old.embed * 1.01)
    sampling = [dataclasses.replace(one, max_tokens=100, ignore_eos=True) for one in PARAMS[:4]]
    before = [one.token_ids for one in replicas[0].generate(PROMPTS[:4], sampling)]
    replicas[0].use_target(new, version=version)
    expected = [one.token_ids for one in replicas[0].generate(PROMPTS[:4], sampling)]
    replicas[0].use_target(old, version=version)
    assert expected != before

    async def test() -> list[Completion]:
        async with ReplicatedLLM([AsyncLLM(one, most_rounds=1) for one in replicas]) as own:
            counts: list[int] = []
            under_way = asyncio.create_task(
                own.generate(PROMPTS[:4], sampling, on_tokens=counts.append)
            )
            while len(counts) < 8 or 0 in own.balancer.requests:
                await asyncio.sleep(0)
            assert not under_way.done()
            await own.use_target(new, version=version + 1, in_flight=in_flight)
            found = await under_way
            assert sum(counts) > sum(len(one.token_ids) for one in found)  # some were taken back
            await own.use_target(old)
            return found

    found = run(test())
    assert [one.token_ids for one in found] == expected
    assert {one.version for one in found} == {version + 1}


def test_what_one_refuses_ends_the_others(replicas: list[LLM]):
    async def test() -> None:
        async with Served(replicas[0], replicas[1:]) as server, server.client() as client:
            own: Any = server.service.llm
            for prompts, status in ([["a"] * 128 * 2, 400], [["ab", "x" * 300], 400]):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.completions.create(model=MODEL, prompt=prompts, max_tokens=8)
                assert caught.value.status_code == status
            full = [["a"] * 128, ["b"] * 128]  # each engine runs 4, and lets 64 wait
            results = await asyncio.gather(
                *(
                    client.completions.create(model=MODEL, prompt=prompts, max_tokens=8)
                    for prompts in full
                ),
                return_exceptions=True,
            )
            refused = [one for one in results if isinstance(one, openai.RateLimitError)]
            assert len(refused) == 1
            assert own.balancer.requests == [0, 0]

    run(test())


def test_health_waits_for_all_and_a_closed_server_ends_all(replicas: list[LLM]):
    async def test() -> list[int]:
        server = Served(replicas[0], replicas[1:])
        async with server.http() as http:
            before = await http.get("/health")
            async with server:
                during = await http.get("/health")
                own = server.service.llm
            after = await http.get("/health")
            for one in own.replicas:
                with pytest.raises(RuntimeError, match="closed"):
                    await one.run(lambda engine: engine.is_idle)
            return [answer.status_code for answer in (before, during, after)]

    assert run(test()) == [503, 200, 503]


def test_an_engine_whose_steps_fail_gets_no_more_requests_until_it_works_again(
    replicas: list[LLM], monkeypatch: pytest.MonkeyPatch
):
    broken, sampling = replicas[0].engine, SamplingParams(max_tokens=4)
    step, is_broken = broken.step, True

    def fail(most_rounds: int | None = None) -> None:
        if not is_broken:
            step(most_rounds)
            return
        error = RuntimeError("out of memory")
        broken._fail(error)
        raise error

    monkeypatch.setattr(broken, "step", fail)

    async def test() -> tuple[list[str], str]:
        nonlocal is_broken
        async with Served(replicas[0], replicas[1:]) as server, server.http() as http:
            own: Any = server.service.llm
            reasons = [(await own.generate(["a"], sampling))[0].finish_reason for _ in range(8)]
            streamed = [event async for event in own.stream(PROMPTS[:3], sampling)]
            reasons += [one.finish_reason for one in streamed if isinstance(one, Completion)]
            metrics, is_broken = (await http.get("/metrics")).text, False
            before = broken.scheduler.cache_statistics()[0]
            async with asyncio.timeout(20):
                while broken.scheduler.cache_statistics()[0] == before:
                    [one] = await own.generate(["b"], sampling)
                    assert one.finish_reason == "length"
            return reasons, metrics

    reasons, metrics = run(test())
    assert reasons.count("error") == 1 and reasons.count("length") == 10
    assert [value(metrics, "engine_failures_total", engine) for engine in (0, 1)] == [1, 0]


@pytest.mark.slow
def test_engines_of_several_devices_work_at_the_same_time(model: Path, llm: LLM):
    """Sums over the devices of one engine do not wait for those of the other."""
    split = [tiny_llm(model, mesh=mesh) for mesh in replica_meshes(2, 2)]
    assert [devices(one) for one in split] == [{0, 1}, {2, 3}]
    expected = llm.generate(PROMPTS, PARAMS)

    async def test() -> list[list[Completion]]:
        async with ReplicatedLLM([AsyncLLM(one) for one in split]) as own:
            return await asyncio.gather(*(own.generate(PROMPTS, PARAMS) for _ in range(4)))

    for completions in run(test()):
        assert [one.text for one in completions] == [one.text for one in expected]
