"""SIGTERM to a server whose requests take longer than they may: nobody is cut off silently."""

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from jaxspec import LLM
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.serving.background import warm_in_background
from jaxspec.serving.endpoint import Endpoint
from jaxspec.serving.lifecycle import serve
from tests.helpers.events import stream_of
from tests.helpers.served import HEAD, MODEL, Served, idle_pages, run

FIELDS = {"model": MODEL, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
LONG = {**FIELDS, "prompt": "abcabc"}
CHAT = {**FIELDS, "messages": [{"role": "user", "content": "abc"}]}
ROWS = 4


@contextlib.asynccontextmanager
async def serving(llm: LLM, drain_seconds: int) -> AsyncIterator[tuple[asyncio.Task[None], str]]:
    """The task of a server as `jaxspec serve` runs it, and its address."""
    own, ready = Served(llm), asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve(
            own.app,
            own.service,
            lambda: AsyncLLM(llm, on_chunk=own.metrics.observe),
            endpoint=Endpoint(),
            drain_seconds=drain_seconds,
            on_ready=ready.set_result,
        )
    )
    try:
        yield server, await ready
    finally:
        if not server.done():
            signal.raise_signal(signal.SIGTERM)
            await server


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A step takes a while, as with a large model."""
    step = llm.engine.step

    def slowly(most_rounds: int | None = None) -> None:
        time.sleep(0.2)
        step(1)

    monkeypatch.setattr(llm.engine, "step", slowly)
    return llm


async def events(http: httpx.AsyncClient, path: str, body: Any, begun: asyncio.Queue[str]):
    """All events of a stream, which must end as HTTP says; ``begun`` is told of the first."""
    found: list[str] = []
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line:
                found.append(line.removeprefix("data: "))
                if len(found) == 1:
                    begun.put_nowait(path)
    return found


async def half_a_request(address: str) -> bytes:
    """The answer to a request whose body never comes."""
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD % 100 + b"{")
    try:
        return await reader.read()
    finally:
        writer.close()


def check_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 503 and answer.headers["Retry-After"], answer.text


def test_what_does_not_end_in_time_is_told_so(slow: LLM, caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        async with (
            serving(slow, drain_seconds=2) as (server, address),
            httpx.AsyncClient(base_url=address, timeout=30) as http,
            httpx.AsyncClient(base_url=address, timeout=30) as kept,
        ):
            assert (await kept.get("/health")).json()["status"] == "ready"
            begun: asyncio.Queue[str] = asyncio.Queue()
            asked = [("/v1/completions", LONG), ("/v1/chat/completions", CHAT)] * (ROWS // 2)
            streams = [asyncio.create_task(events(http, *one, begun)) for one in asked]
            for _ in streams:
                await begun.get()
            waiting = [
                asyncio.create_task(http.post("/v1/completions", json={**LONG, **fields}))
                for fields in ({}, {"prompt": ["ab", "cd"]}, {"stream": True})
            ]
            half = asyncio.create_task(half_a_request(address))
            await asyncio.sleep(0.2)
            started = time.perf_counter()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            async with httpx.AsyncClient(base_url=address) as new:
                for client in (kept, new):
                    answer = await client.post("/v1/completions", json=LONG)
                    check_refused(answer)
                    assert answer.headers["Connection"] == "close"
                    check_refused(await client.get("/v1/models"))
                    answer = await client.get("/health")
                    check_refused(answer)
                    assert "ending" in answer.json()["error"]["message"]
                    metrics = await client.get("/metrics")
                    assert 'num_requests_running{engine="0",model_name="tiny"} 4.0' in metrics.text
            for found in await asyncio.gather(*streams):
                assert json.loads(found[0])["choices"]
                error = json.loads(found[-2])["error"]
                assert (error["code"], error["type"]) == ("shutting_down", "server_error")
                assert found[-1] == "[DONE]"
            for answer in await asyncio.gather(*waiting):
                check_refused(answer)
                assert answer.json()["error"]["code"] == "shutting_down"
            assert (await half).startswith(b"HTTP/1.1 503 ")
            await server
            assert 1 <= time.perf_counter() - started < 6

    run(test())
    assert caplog.messages == [
        "requests under way: 8, which are cut after 1 s, or by a second signal",
        "after 1 s requests under way were cut: 8",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert idle_pages(slow)


def test_what_ends_in_time_is_whole_and_nobody_waits_for_the_limit(
    slow: LLM, caplog: pytest.LogCaptureFixture
):
    async def test() -> tuple[list[str], float]:
        async with (
            serving(slow, drain_seconds=60) as (server, address),
            httpx.AsyncClient(base_url=address, timeout=30) as http,
        ):
            begun: asyncio.Queue[str] = asyncio.Queue()
            body = {**LONG, "max_tokens": 8}
            stream = asyncio.create_task(events(http, "/v1/completions", body, begun))
            await begun.get()
            signal.raise_signal(signal.SIGTERM)
            found, started = await stream, time.perf_counter()
            await server
            return found, time.perf_counter() - started

    found, seconds = run(test())
    assert json.loads(found[-2])["choices"][0]["finish_reason"] == "length"
    assert seconds < 10
    assert caplog.messages == [
        "requests under way: 1, which are cut after 59 s, or by a second signal"
    ]


def test_a_second_signal_does_not_wait(slow: LLM, caplog: pytest.LogCaptureFixture):
    async def test() -> float:
        async with serving(slow, drain_seconds=60) as (server, address):
            client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none")
            request: Any = {"model": MODEL, "prompt": "abcabc", "max_tokens": 200, "stream": True}
            request["extra_body"] = {"ignore_eos": True}
            stream = await client.completions.create(**request)
            with pytest.raises(openai.APIError, match="the server is ending"):
                async for chunk in stream:
                    if chunk.choices[0].text:
                        signal.raise_signal(signal.SIGTERM)
            started = time.perf_counter()
            await client.close()
            await server
            return time.perf_counter() - started

    assert run(test()) < 10 and len(caplog.records) == 1  # after the first signal


def test_a_server_that_ends_compiles_no_more(llm: LLM):
    async def test() -> tuple[bool, int]:
        async with AsyncLLM(llm) as own:
            before = llm.engine.programs.compiled
            done = await warm_in_background(own, lambda: False)
            return done, llm.engine.programs.compiled - before

    assert run(test()) == (False, 0)


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/responses", {"input": "abc", "ignore_eos": True}, "response.failed"),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 200}, "error"),
    ],
    ids=["responses", "messages"],
)
def test_a_stream_of_typed_events_is_cut_in_its_words(
    slow: LLM, path: str, body: dict[str, Any], last: str
):
    async def test() -> list[dict[str, Any]]:
        async with Served(slow) as server, server.http() as http:
            asked = {"model": MODEL, "temperature": 0, **body}
            streamed = asyncio.create_task(stream_of(http, path, asked))
            await asyncio.sleep(1)
            server.service.cut.set()
            return await streamed

    found = run(test())
    assert found[-1]["type"] == last and len(found) > 3
    if last == "error":
        assert found[-1]["error"]["type"] == "overloaded_error" and found[-1]["request_id"]
    else:
        assert found[-1]["sequence_number"] == len(found) - 1
        response = found[-1]["response"]
        assert response["error"]["code"] == "server_error" and response["output"]
    assert idle_pages(slow)
