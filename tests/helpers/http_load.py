"""A mixed load on a server of the built-in model, a part of whose clients is killed."""

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

from tests.helpers.serve_process import ServeProcess

PROMPTS = (
    "def read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\n\ndef walk(folder):\n    for name in os.listdir(folder):\n",
    "for name in names:\n    print(",
    "def fib(n):\n    if n < 2:\n        return n\n" * 4,
    "# a long file\n" + "x = compute(x, 1)\n" * 16,
)
OPTIONS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "stop": ["\n\n", "return"]},
    {"temperature": 0.7, "n": 2},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z]{5,12}"}},
    {"temperature": 1.0, "repetition_penalty": 1.2, "min_tokens": 4},
)
SERVER = ("--max-length", "256", "--warm-up", "full", "--no-trees")
LIMIT = 300  # seconds of one request
COMPILED = "programs_compiled_total"


def requests(count: int) -> list[dict[str, Any]]:
    """Different ones."""
    rng = random.Random(0)
    return [
        {
            "prompt": rng.choice(PROMPTS),
            "max_tokens": rng.choice((4, 16, 32, 64)),
            "seed": index,
            "stream": rng.random() < 0.5,
            **OPTIONS[index % len(OPTIONS)],
        }
        for index in range(count)
    ]


async def answer(http: httpx.AsyncClient, request: dict[str, Any]) -> list[str]:
    """The text of each choice. Raises RuntimeError for any error."""
    if not request["stream"]:
        whole = await http.post("/v1/completions", json=request)
        if whole.status_code != 200:
            raise RuntimeError(f"{whole.status_code}: {whole.text}")
        return [choice["text"] for choice in whole.json()["choices"]]
    texts = [""] * request.get("n", 1)
    async with http.stream("POST", "/v1/completions", json=request) as stream:
        async for line in stream.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "choices" not in event:
                raise RuntimeError(data)
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts


@dataclasses.dataclass
class Report:
    """``alone``: the texts of requests that run alone. ``wrong``: requests that failed, or whose
    text is another one."""

    alone: list[list[str]]
    requests: int = 0
    killed: int = 0
    compiled: int = 0  # during the load
    wrong: list[str] = dataclasses.field(default_factory=list)


async def answers(server: ServeProcess, different: int) -> list[list[str]]:
    """To so many different requests, one after the other."""
    async with httpx.AsyncClient(base_url=server.address, timeout=LIMIT) as http:
        return [await answer(http, kind) for kind in requests(different)]


async def load(server: ServeProcess, count: int, clients: int, different: int) -> Report:
    """Send so many requests, of so many different ones."""
    alone = await answers(server, different)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=LIMIT, limits=limits) as http:
        kinds = requests(different)
        report, rng, compiled = Report(alone), random.Random(1), server.metric(COMPILED)

        async def client() -> None:
            while report.requests < count:
                report.requests += 1
                which, dies, after = rng.randrange(different), rng.random() < 0.1, rng.random()
                if dies:
                    report.killed += 1
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(2 * after):
                            await answer(http, kinds[which])
                    continue
                try:
                    texts = await answer(http, kinds[which])
                    if texts != alone[which]:
                        report.wrong.append(f"{kinds[which]}: {texts} is not {alone[which]}")
                except (RuntimeError, httpx.HTTPError) as error:
                    report.wrong.append(f"{kinds[which]}: {error!r}")

        await asyncio.gather(*(client() for _ in range(clients)))
        report.compiled = int(await asyncio.to_thread(server.metric, COMPILED) - compiled)
        return report
