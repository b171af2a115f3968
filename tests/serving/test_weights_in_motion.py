"""A policy that is trained while a server samples from it, and the server's control path."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array

from jaxspec import LLM, SamplingParams, token_logprobs
from jaxspec.checkpoints.orbax_io import save_pytree
from jaxspec.models.decoder import Decoder
from tests.helpers.marks import slow
from tests.helpers.served import MODEL, Served, run

ADMIN = {"Authorization": "Bearer secret"}
BODY = {
    "model": MODEL,
    "prompt": "abcabcabc",
    "max_tokens": 24,
    "temperature": 1,
    "ignore_eos": True,
}
LONG = {**BODY, "max_tokens": 200}
STEPS, WIDTH = 3, 64


@pytest.fixture
def own(llm: LLM) -> Any:
    """The engine of other tests, which gets its weights back."""
    before = llm.params.target
    yield llm
    llm.use_target(before)


def loss(target: Decoder, tokens: Array, lengths: Array, advantages: Array) -> Array:
    return -(token_logprobs(target, tokens, lengths) * advantages[:, None]).sum() / lengths.sum()


@jax.jit
def train(target: Decoder, tokens: Array, lengths: Array, advantages: Array) -> Decoder:
    """One step; ``target`` is not donated, since it serves."""
    gradients = jax.grad(loss)(target, tokens, lengths, advantages)
    clipped, _ = optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())
    return jax.tree.map(lambda weight, step: weight - 0.3 * step, target, clipped)


def batch(answers: list[dict[str, Any]]) -> tuple[Array, Array, Array]:
    """Texts as right-padded rows; the reward is the share of small token ids."""
    [choices] = zip(*(answer["choices"] for answer in answers), strict=True)
    rows = [choice["prompt_token_ids"] + choice["token_ids"] for choice in choices]
    tokens = np.zeros((len(rows), WIDTH), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    rewards = np.array([np.mean(np.array(choice["token_ids"]) < 128) for choice in choices])
    return (
        jnp.asarray(tokens),
        jnp.asarray([len(ids) for ids in rows], jnp.int32),
        jnp.asarray(rewards - rewards.mean(), jnp.float32),
    )


async def completion(http: httpx.AsyncClient, body: dict[str, Any], **more: Any) -> Any:
    answer = await http.post("/v1/completions", json={**body, "return_token_ids": True, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def control(server: Served, path: str, body: dict[str, Any] | None = None) -> Any:
    async with server.http() as admin:
        answer = await admin.post(path, json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def update_under_way(server: Served, body: dict[str, Any]) -> Any:
    """Update the weights; no request ends before they are read."""
    [replica] = server.service.llm.replicas
    engine, weights = replica.engine, replica.llm.engine.weights
    version = weights.newest.version
    await engine.pause()
    updating = asyncio.create_task(control(server, "/update_weights_from_disk", body))
    await until(lambda: updating.done() or weights.newest.version > version)
    await engine.pause(False)
    return await updating


# To repair takes programs of its own, which are compiled.
@pytest.mark.parametrize("in_flight", ["restart", slow("repair")])
def test_a_policy_is_trained_while_it_serves(own: LLM, in_flight: str, tmp_path: Path):
    """Rollouts come from the server, while others ask. Weights go to it in the process, from disk
    while requests are under way, and from disk while it is paused."""
    targets = {"default": own.params.target}

    async def test() -> tuple[list[list[Any]], list[tuple[int, Any]]]:
        rollouts, others = [], []
        async with Served(own, admin_key="secret") as server, server.http() as http:
            serving: Any = server.service.llm

            async def ask() -> None:
                while len(rollouts) < STEPS:
                    body = {**BODY, "seed": 1, "return_token_ids": True}
                    answer = await http.post("/v1/completions", json=body)
                    if answer.status_code == 503:  # paused
                        await asyncio.sleep(0.001)
                    else:
                        others.append((1, answer.json()))

            async def learn(name: str) -> None:
                seeds = range(100 * len(targets), 100 * len(targets) + 4)
                asked = (completion(http, BODY, seed=seed) for seed in seeds)
                rollouts.append(await asyncio.gather(*asked))
                last = list(targets.values())[-1]
                targets[name] = await asyncio.to_thread(train, last, *batch(rollouts[-1]))

            def on_disk(name: str) -> dict[str, Any]:
                """The body of an update."""
                save_pytree(tmp_path / name, targets[name])
                return {"model_path": str(tmp_path / name), "weight_version": name}

            async def in_use() -> str:
                return (await http.get("/weight_info", headers=ADMIN)).json()["weight_version"]

            asking = asyncio.create_task(ask())
            await learn("1001")
            await serving.use_target(targets["1001"], version=1001, in_flight="restart")
            assert await in_use() == "1001"

            await learn("s2")
            body = {**on_disk("s2"), "in_flight": in_flight}
            serving.engine._most_rounds = 1
            running = asyncio.create_task(completion(http, LONG, seed=2))
            await until(lambda: own.engine.scheduler.num_running == 2)
            updated = await update_under_way(server, body)
            assert updated["weight_version"] == await in_use() == "s2"
            others.append((2, await running))
            assert others[-1][1]["weight_version"] == "s2"

            await learn("s3")
            assert await control(server, "/pause?mode=wait") == {"is_paused": True}
            await control(server, "/update_weights_from_disk", on_disk("s3"))
            assert await control(server, "/resume") == {"is_paused": False}
            assert await in_use() == "s3"
            await asking
            others.append((1, await completion(http, BODY, seed=1)))
            return rollouts, others

    rollouts, others = run(test())
    names = [{answer["weight_version"] for answer in group} for group in rollouts]
    assert names == [{"default"}, {"1001"}, {"s2"}]
    assert len({group[0]["system_fingerprint"] for group in rollouts}) == STEPS
    found: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for seed, answer in others:
        texts = found.setdefault((answer["weight_version"], seed), set())
        texts.add(tuple(answer["choices"][0]["token_ids"]))
    assert {("s2", 2), ("s3", 1)} <= found.keys()
    for (name, seed), texts in found.items():
        own.use_target(targets[name])
        most = (LONG if seed == 2 else BODY)["max_tokens"]
        sampling = SamplingParams(max_tokens=most, temperature=1.0, seed=seed, ignore_eos=True)
        [fresh] = own.generate([BODY["prompt"]], sampling)
        assert texts == {tuple(fresh.token_ids)}, (name, seed)
    first, *_, last = (target.embed for target in targets.values())
    assert not jnp.array_equal(first, last)


# By default requests finish in tests/llm/test_llm_weights.py.
@pytest.mark.parametrize("in_flight", [slow("finish"), "restart"])
def test_a_step_on_disk_serves_while_requests_are_taken(own: LLM, in_flight: str, tmp_path: Path):
    old = own.params.target
    new = old.replace(embed=jnp.roll(old.embed, 1, axis=0))
    save_pytree(tmp_path / "step", new)
    body = {"model_path": str(tmp_path / "step"), "weight_version": "s7", "in_flight": in_flight}

    async def test() -> list[Any]:
        async with Served(own, admin_key="secret") as server, server.http() as http:
            before = await completion(http, LONG, seed=5)
            server.service.llm.replicas[0].engine._most_rounds = 1
            running = asyncio.create_task(completion(http, LONG, seed=5))
            await until(lambda: own.engine.scheduler.num_running)
            assert (await update_under_way(server, body))["weight_version"] == "s7"
            return [before, await running, await completion(http, LONG, seed=5)]

    before, during, after = run(test())
    assert [before["weight_version"], after["weight_version"]] == ["default", "s7"]
    same = after if during["weight_version"] == "s7" else before
    assert during["choices"][0]["text"] == same["choices"][0]["text"]
    assert during["weight_version"] == ("s7" if in_flight == "restart" else "default")
    assert before["choices"][0]["text"] != after["choices"][0]["text"]
    assert during["system_fingerprint"] == same["system_fingerprint"]


def test_what_the_control_path_refuses(own: LLM, tmp_path: Path):
    save_pytree(tmp_path / "step", own.params.target.replace(layers=()))

    async def test() -> list[Any]:
        async with Served(own, admin_key="secret") as server, server.http() as http:
            answers = []
            for more in (
                {"keep_pause": True},
                {"abort_all_requests": True},
                {},
                {"in_flight": "x"},
            ):
                body = {"model_path": str(tmp_path / "step"), "in_flight": "restart", **more}
                answers.append(
                    await http.post("/update_weights_from_disk", json=body, headers=ADMIN)
                )
            version = await http.get("/weight_info", headers=ADMIN)
            assert version.json() == {"weight_version": "default"}
            return [(answer.status_code, answer.text) for answer in answers]

    (code, pause), (other, _), (wrong, shapes), (unknown, _) = run(test())
    assert [code, other, wrong, unknown] == [400, 400, 400, 400]
    assert "in_flight does not pause" in pause and "another structure" in shapes
