"""Clients that are slow, silent or half gone do not hold others up."""

import asyncio
import json
import time

import httpx
import pytest

from jaxspec import LLM
from jaxspec.serving import lifecycle
from tests.helpers.served import HEAD, Served, idle_pages, run

BODY = {"prompt": "abcabc", "max_tokens": 8, "temperature": 0}


async def slowly(address: tuple[str, int], request: bytes, pause: float) -> bytes:
    """The answer to a request that is sent byte by byte."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for byte in request:
            writer.write(bytes([byte]))
            await asyncio.sleep(pause)
        return await reader.read()
    finally:
        writer.close()


async def ask(address: tuple[str, int], count: int) -> float:
    """The longest of so many requests, in seconds."""
    longest = 0.0
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as http:
        for _ in range(count):
            started = time.perf_counter()
            answer = await http.post("/v1/completions", json=BODY, timeout=30)
            assert answer.status_code == 200, answer.text
            longest = max(longest, time.perf_counter() - started)
    return longest


def test_slow_and_half_open_connections_hold_nobody_up(llm: LLM):
    """A byte a second: of the head, of the body, and of the answer; and nothing at all."""

    async def test() -> None:
        async with Served(llm) as server, server.address() as address:
            alone = await ask(address, 5)
            content = json.dumps(BODY).encode()
            slow = [
                *(slowly(address, HEAD % len(content) + content, 1) for _ in range(50)),
                *(slowly(address, HEAD % len(content) + content[:9], 1) for _ in range(50)),
            ]
            tasks = [asyncio.create_task(one) for one in slow]
            silent = [await asyncio.open_connection(*address) for _ in range(100)]
            unread = [await asyncio.open_connection(*address) for _ in range(50)]
            for _, writer in unread:  # they ask, and never read
                writer.write(HEAD % len(content) + content)
            await asyncio.sleep(0.2)
            beside = await ask(address, 20)
            assert not any(task.done() for task in tasks)
            assert beside < 20 * alone + 1
            for task in tasks:
                task.cancel()
            for _, writer in (*silent, *unread):
                writer.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(test())
    assert idle_pages(llm)


def test_a_slow_request_is_served_all_the_same(llm: LLM):
    async def test() -> bytes:
        async with Served(llm) as server, server.address() as address:
            content = json.dumps(BODY).encode()
            head = HEAD.replace(b"Host: x", b"Host: x\r\nConnection: close") % len(content)
            return await slowly(address, head + content, 0.002)

    assert b'"finish_reason":"length"' in run(test())


def test_a_body_has_its_time(llm: LLM):
    async def test() -> bytes:
        async with Served(llm, body_seconds=0.2) as server, server.address() as address:
            return await slowly(address, HEAD % 100 + b"{", 0)

    answer = run(test())
    assert b" 408 " in answer and b"took more than" in answer


def test_a_connection_without_a_request_is_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "HEADER_SECONDS", 0.3)

    async def test() -> None:
        async with Served(llm) as server, server.address() as address:
            assert await slowly(address, b"", 0) == b""
            assert await slowly(address, b"POST /v1", 0) == b""
            content = json.dumps({**BODY, "max_tokens": 64}).encode()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(HEAD % len(content) + content)
            assert b" 200 " in await reader.readline()  # a request may take longer
            writer.close()

    run(test())


def test_a_grammar_that_takes_long_holds_nobody_up(llm: LLM):
    async def bombs(address: tuple[str, int], count: int) -> list[int]:
        async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as http:
            specs = [{"regex": f"(a{{1000}}){{1000}}{i}"} for i in range(count)]
            bodies = [{**BODY, "structured_outputs": spec} for spec in specs]
            answers = [http.post("/v1/completions", json=body, timeout=30) for body in bodies]
            return [answer.status_code for answer in await asyncio.gather(*answers)]

    async def test() -> None:
        async with Served(llm) as server, server.address() as address:
            alone = await ask(address, 5)
            exploding = asyncio.create_task(bombs(address, 12))
            await asyncio.sleep(0)
            beside = await ask(address, 5)
            statuses = await exploding
            assert set(statuses) <= {400, 429} and 400 in statuses
            assert beside < 20 * alone + 1

    run(test())
