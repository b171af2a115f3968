"""Pauses, and other weights, for who has the admin's key."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from anthropic.types import Message
from openai.types.responses import Response
from transformers import AutoTokenizer, LlamaForCausalLM

from jaxspec import LLM
from tests.helpers.checkpoints import tiny_byte_llama, tiny_llama
from tests.helpers.events import stream_of
from tests.helpers.served import MODEL, Served, run, with_http

KEY = {"Authorization": "Bearer secret"}
BODY = {"model": MODEL, "prompt": "abcabcabcabc", "max_tokens": 12, "temperature": 0}
LONG = {**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True}


def admin(llm: LLM, test: Any) -> Any:
    return with_http(llm, test, admin_key="secret", api_keys=["user"])


async def post(http: httpx.AsyncClient, path: str, **options: Any) -> httpx.Response:
    return await http.post(path, headers=KEY, **options)


async def text(http: httpx.AsyncClient, body: Any = BODY) -> httpx.Response:
    headers = {"Authorization": "Bearer user"}
    return await http.post("/v1/completions", json=body, headers=headers)


def greedy_text(path: Path) -> str:
    """What transformers writes for BODY."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer(BODY["prompt"], return_tensors="pt").input_ids
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = model.generate(prompt, max_new_tokens=BODY["max_tokens"], do_sample=False)
    return tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)


def test_other_weights_serve_under_another_version(llm: LLM, model: Path, tmp_path: Path):
    other = tiny_byte_llama(tmp_path, seed=1, eos_token_id=256)

    async def test(http: httpx.AsyncClient) -> list[Any]:
        found = [(await text(http)).json()]
        for path, more in ((other, {}), (model, {"weight_version": "step 7"})):
            body = {"model_path": str(path), **more}
            done = await post(http, "/update_weights_from_disk", json=body)
            assert done.json()["success"], done.text
            found.append((await text(http)).json())
        return found

    first, second, third = admin(llm, test)
    [choice], [changed], [back] = (answer["choices"] for answer in (first, second, third))
    assert changed["text"] == greedy_text(other) != choice["text"] == back["text"]
    versions = [answer["weight_version"] for answer in (first, second, third)]
    assert versions == ["default", "1", "step 7"]
    assert len({answer["system_fingerprint"] for answer in (first, second, third)}) == 3
    usage = [answer["usage"]["prompt_tokens_details"] for answer in (second, third)]
    assert usage == 2 * [{"cached_tokens": 0}], "pages of other weights were taken"


def test_responses_and_messages_name_the_weights_that_made_them(llm: LLM, model: Path):
    """The official clients' classes take the field, which is none of theirs."""
    asked = {"model": MODEL, "temperature": 0}
    response = {**asked, "input": "abc", "max_output_tokens": 4}
    message = {**asked, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}

    async def test(http: httpx.AsyncClient) -> list[Any]:
        found = []
        for path, body in (("/v1/responses", response), ("/v1/messages", message)):
            found += [(await http.post(path, json=body)).json(), await stream_of(http, path, body)]
        kept = await http.get(f"/v1/responses/{found[0]['id']}")
        return [*found, kept.json()]

    whole, events, written, told, kept = with_http(llm, test, admin_key="secret")
    created, *_, completed = (event["response"] for event in events if "response" in event)
    for answer in (whole, created, completed, kept):
        assert (Response.model_validate(answer).model_extra or {})["weight_version"] == "default"
    for answer in (written, told[0]["message"]):
        assert (Message.model_validate(answer).model_extra or {})["weight_version"] == "default"
    for answer in (found for found in with_http(llm, test) if isinstance(found, dict)):
        assert "weight_version" not in answer


def test_new_weights_have_another_version_in_each_api(llm: LLM, model: Path):
    async def test(http: httpx.AsyncClient) -> list[Any]:
        body = {"model_path": str(model), "weight_version": "step 7"}
        await post(http, "/update_weights_from_disk", json=body)
        asked = {"model": MODEL, "temperature": 0, "input": "abc", "max_output_tokens": 4}
        user = {"Authorization": "Bearer user"}
        answer = await http.post("/v1/responses", json=asked, headers=user)
        return [answer.json(), (await text(http)).json()]

    versions = [answer["weight_version"] for answer in admin(llm, test)]
    assert versions == ["step 7", "step 7"]


def test_weights_that_do_not_fit_leave_those_in_use(llm: LLM, tmp_path: Path):
    wrong = tiny_llama(tmp_path / "wrong", hidden_size=128)

    async def test(http: httpx.AsyncClient) -> list[Any]:
        before = (await text(http)).json()["choices"]
        refused = [
            await post(http, "/update_weights_from_disk", json={"model_path": str(path)})
            for path in (wrong, tmp_path / "nothing")
        ]
        assert (await text(http)).json()["choices"] == before
        version = await http.get("/get_weight_version", headers=KEY)
        return [version.json()["weight_version"], *(one.status_code for one in refused)]

    assert admin(llm, test) == ["default", 400, 400]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_paused_server_takes_no_requests(llm: LLM, mode: str):
    async def test() -> tuple[str, list[Any], str]:
        async with (
            Served(llm, admin_key="secret") as server,
            server.http() as http,
            server.http() as another,
        ):
            running = asyncio.create_task(text(http, LONG))
            while server.service.under_way == 0 or llm.engine.is_idle:
                await asyncio.sleep(0.001)
            pausing = await post(another, f"/pause?mode={mode}")
            assert pausing.json() == {"is_paused": True}
            assert (await another.get("/is_paused", headers=KEY)).json() == {"is_paused": True}
            codes: list[Any] = []
            waiting = None
            if mode == "keep":
                waiting = asyncio.create_task(text(http))
                await asyncio.sleep(0.1)
                assert not (waiting.done() or running.done())
                busy = await post(another, "/update_weights_from_disk", json={"model_path": "x"})
                assert busy.status_code == 409
            else:
                assert running.done() or server.service.under_way == 0
                codes.append((await text(another)).status_code)
            await post(another, "/resume")
            codes.append((await (waiting or text(another))).status_code)
            reasons = [line for line in (await running).text.split("data: ") if "reason" in line]
            return reasons[-1], codes, mode

    last, codes, _ = run(test())
    assert f'"finish_reason":"{"abort" if mode == "abort" else "length"}"' in last
    assert codes == ([200] if mode == "keep" else [503, 200])


def test_without_the_key_nobody_may(llm: LLM):
    async def test(http: httpx.AsyncClient) -> list[int]:
        wrong = {"Authorization": "Bearer user"}
        answers = [await http.post("/pause", headers=wrong), await http.post("/pause")]
        return [answer.status_code for answer in answers]

    assert admin(llm, test) == [401, 401]
    assert with_http(llm, test) == [404, 404]
