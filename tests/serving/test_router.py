"""Replicas behind an existing router, smg: under load, one is killed and comes back, and the other
is ended by SIGTERM."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parent.parent.parent
MODEL = "python-lm"  # the built-in one
CLIENTS = 6
PAUSE = 0.3  # seconds between the requests of a client: the replicas are busy, not flooded
LIMIT = 120  # seconds that anything may take
BEGINNINGS = [f'def read_{name}(path):\n    """Read it."""\n' * 6 for name in "abcdef"]
PROMPTS = [f"{beginning}    x{end} = " for beginning in BEGINNINGS for end in range(4)]
ROUTER = ("--policy", "cache_aware", "--health-check-interval-secs", "1")
ROUTER += ("--health-failure-threshold", "2", "--health-success-threshold", "1")
ROUTER += ("--cb-timeout-duration-secs", "5", "--log-level", "warn")

needs_router = pytest.mark.skipif(
    shutil.which("smg") is None,
    reason="the router is not installed: pip install smg, in an environment on PATH",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Process:
    """A server at a port of this machine; it can be killed, and started again."""

    def __init__(self, command: list[str], port: int, log: Path):
        self.command, self.address, self.log = command, f"http://127.0.0.1:{port}", log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def terminate(self) -> int:
        """Its exit status after SIGTERM."""
        assert self.process is not None
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, LIMIT)

    async def ready(self) -> float:
        """Seconds until it serves."""
        started = time.perf_counter()
        async with asyncio.timeout(LIMIT):
            while True:
                assert self.process is not None
                assert self.process.poll() is None, self.log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    async with httpx.AsyncClient(timeout=5) as client:
                        if (await client.get(f"{self.address}/health")).status_code == 200:
                            return time.perf_counter() - started
                await asyncio.sleep(0.1)

    async def metric(self, name: str) -> float:
        async with httpx.AsyncClient(timeout=LIMIT) as client:
            text = (await client.get(f"{self.address}/metrics")).text
        return total(text, f"jaxspec:{name}")


def total(metrics: str, name: str) -> float:
    found = re.findall(rf"^{name}{{.*}} (.*)$", metrics, re.MULTILINE)
    return sum(map(float, found))


@contextlib.contextmanager
def processes(*all_of_them: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for one in all_of_them:
            one.kill()


@dataclasses.dataclass
class Outcome:
    """How a request ended.

    Attributes:
      kind: ``whole``, ``cut`` (a stream that ended with an error event), or the status.
      text: what there was of it, or what was said of the error.
    """

    prompt: str
    kind: str
    text: str


async def complete(client: httpx.AsyncClient, address: str, prompt: str) -> Outcome:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0}
    answer = await client.post(f"{address}/v1/completions", json=body)
    if answer.status_code != 200:
        return Outcome(prompt, str(answer.status_code), answer.text)
    return Outcome(prompt, "whole", answer.json()["choices"][0]["text"])


async def stream(client: httpx.AsyncClient, address: str, prompt: str) -> Outcome:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, "stream": True}
    text, kind = "", "silent"
    async with client.stream("POST", f"{address}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return Outcome(prompt, str(answer.status_code), (await answer.aread()).decode())
        async for event in events(answer):
            if "error" in event:
                kind = "cut"
            for choice in event.get("choices", []):
                text += choice["text"]
                kind = kind if choice["finish_reason"] is None else "whole"
    return Outcome(prompt, kind, text)


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def kill_under_a_stream(
    client: httpx.AsyncClient, router: Process, replicas: list[Process]
) -> Process:
    """Kill the replica that is in the midst of a stream; the client is told. Returns it."""
    body = {"model": MODEL, "prompt": "class A:\n", "max_tokens": 1500, "ignore_eos": True}
    address = f"{router.address}/v1/completions"
    async with client.stream("POST", address, json=body | {"stream": True}) as answer:
        chosen = answer.headers["x-smg-routed-worker-id"]
        [victim] = [one for one in replicas if one.address == chosen]
        received = events(answer)
        assert "choices" in await anext(received)
        victim.kill()
        *_, last = [event async for event in received]
    assert last["error"]["type"] == "stream_error"
    return victim


@contextlib.asynccontextmanager
async def load(address: str, outcomes: list[Outcome]) -> AsyncIterator[None]:
    """Clients that send one request after the other, until the end of the ``with`` block."""
    going = True

    async def send(first: int) -> None:
        async with httpx.AsyncClient(timeout=LIMIT) as client:
            number = first
            while going:
                ask = stream if number % 2 else complete
                outcomes.append(await ask(client, address, PROMPTS[number % len(PROMPTS)]))
                number += CLIENTS + 1
                await asyncio.sleep(PAUSE)

    tasks = [asyncio.create_task(send(first)) for first in range(CLIENTS)]
    try:
        yield
    finally:
        going = False
        await asyncio.gather(*tasks)


@pytest.mark.slow
@needs_router
def test_no_request_is_lost_when_replicas_are_killed_and_ended(tmp_path: Path):
    ports = [free_port() for _ in range(4)]
    cache = ("--compilation-cache", str(tmp_path / "programs"))
    replicas = [
        Process(
            [sys.executable, "scripts/serve.py", "--port", str(port), *cache],
            port,
            tmp_path / f"replica{port}.log",
        )
        for port in ports[:2]
    ]
    command = ["smg", "launch", "--host", "127.0.0.1", "--port", str(ports[2]), *ROUTER]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports[3])]
    command += ["--worker-urls", *(one.address for one in replicas)]
    router = Process(command, ports[2], tmp_path / "router.log")

    async def test() -> None:
        started = []
        for one in replicas:  # one after the other: the second finds the first one's programs
            one.start()
            started.append(await one.ready())
        async with httpx.AsyncClient(timeout=LIMIT) as client:
            alone = [await complete(client, replicas[1].address, prompt) for prompt in PROMPTS]
            expected = {one.prompt: one.text for one in alone}
            router.start()
            await router.ready()
            outcomes: list[Outcome] = []
            async with load(router.address, outcomes):
                await asyncio.gather(*(served(one, 200) for one in replicas))
                before = len(outcomes)
                victim = await kill_under_a_stream(client, router, replicas)
                killed = time.perf_counter()
                victim.start()
                again = await victim.ready()
                await served(victim, 200)
                back = time.perf_counter() - killed
                [other] = [one for one in replicas if one is not victim]
                cached = await other.metric("prompt_tokens_cached_total")
                asked = await other.metric("prompt_tokens_total")
                ending = len(outcomes)
                assert await other.terminate() == 0
                await asyncio.sleep(10 * PAUSE)
            metrics = await client.get(f"http://127.0.0.1:{ports[3]}/metrics")
        kinds = collections.Counter(one.kind for one in outcomes)
        retries = total(metrics.text, "smg_worker_retries_total")
        print(f"\nready after {started[0]:.1f} s, with stored programs {started[1]:.1f} s, after")
        print(f"kill -9 {again:.1f} s; had served 200 tokens again after {back:.1f} s.")
        print(
            f"{len(outcomes)} requests, {before} before the kill, {len(outcomes) - ending}", end=" "
        )
        print(f"since SIGTERM to the other: {dict(kinds)};", end=" ")
        print(f"{retries:.0f} retries of the router")
        print(f"prompt tokens found in the other's cache: {cached:.0f} of {asked:.0f}")
        check(outcomes, expected)
        assert all(one.kind == "whole" for one in outcomes[ending:])
        assert cached > asked / 2

    with processes(router, *replicas):
        asyncio.run(test())


async def served(replica: Process, tokens: int) -> None:
    """Wait until a replica has generated so many."""
    async with asyncio.timeout(LIMIT):
        while await replica.metric("generation_tokens_total") < tokens:
            await asyncio.sleep(0.2)


def check(outcomes: list[Outcome], expected: dict[str, str]) -> None:
    """Whole texts are right, and what is not whole says so. Each client had at most one request
    under way when the replica was killed."""
    for one in outcomes:
        if one.kind == "whole":
            assert one.text == expected[one.prompt]
        elif one.kind == "cut":
            assert expected[one.prompt].startswith(one.text)
        else:
            assert int(one.kind) in (500, 502, 503, 504) and "error" in json.loads(one.text)
    broken = [one for one in outcomes if one.kind != "whole"]
    assert len(broken) <= CLIENTS, collections.Counter(one.kind for one in broken)
