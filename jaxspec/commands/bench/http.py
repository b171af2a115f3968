"""Measure what HTTP costs: the same streams from the engine, as text, and from a server.

The server runs in this process, as `jaxspec serve` does; its clients in another one, where they do
no more than count. Runs of the three take turns, after one of each that is not counted. The share
of the engine's rate is the median over the turns: a machine that is slow for a while slows all
three of a turn.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from rich.table import Table

from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.commands.shared.engine_options import AUTO_DRAFTER_HELP
from jaxspec.commands.shared.option_types import number
from jaxspec.commands.shared.run_facts import run_facts
from jaxspec.commands.shared.shell import (
    add_model_option,
    command_parser,
    progress_console,
    run_command,
    show_results,
)
from jaxspec.engine.warm_up.compile_by_running import compile_by_running
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.serving.app import make_app
from jaxspec.serving.endpoint import Endpoint
from jaxspec.serving.lifecycle import serve
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.service import Service

NAMES = ("engine", "text", "http")
MEANING = ("AsyncEngine: tokens", "AsyncLLM: text", "the server, over HTTP")
PROMPT_TOKENS = 32


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench http", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help=AUTO_DRAFTER_HELP)
    add("--streams", type=number, default=32, help="requests at once; the engine has a row for "
        "each")  # fmt: skip
    add("--new-tokens", type=number, default=128, help="tokens that each generates")
    add(
        "--rounds-per-call", type=number, default=8, help="most rounds between two looks at results"
    )
    add("--repeats", type=number, default=5, help="runs of each, of which the median is shown")
    add("--json", action="store_true", help="print one JSON object")
    return parser


class Streams:
    """One run: requests that differ from those of other runs, so that no prompt is known."""

    def __init__(self, arguments: argparse.Namespace, vocab_size: int, run: int):
        self.salt, count = f"run {run}", arguments.streams
        self.prompts = [
            [(97 * index + 31 * place) % vocab_size for place in range(PROMPT_TOKENS)]
            for index in range(count)
        ]
        self.fields = {"max_tokens": arguments.new_tokens, "temperature": 1.0, "ignore_eos": True}
        self.sampling = [
            SamplingParams(**self.fields, seed=index, cache_salt=self.salt)
            for index in range(count)
        ]

    def bodies(self) -> list[dict[str, Any]]:
        fixed = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": self.salt}
        return [
            {**self.fields, **fixed, "prompt": prompt, "seed": index}
            for index, prompt in enumerate(self.prompts)
        ]


async def from_engine(llm: AsyncLLM, streams: Streams) -> float:
    """Tokens a second of streams of tokens, each with a task of its own."""

    async def count_tokens(index: int) -> int:
        chunks = llm.engine.generate(streams.prompts[index], streams.sampling[index])
        return sum([len(chunk.token_ids) async for chunk in chunks])

    return await _rate(count_tokens, len(streams.prompts))


async def from_text(llm: AsyncLLM, streams: Streams) -> float:
    """Tokens a second of streams of text."""

    async def count_tokens(index: int) -> int:
        events = llm.stream([streams.prompts[index]], [streams.sampling[index]])
        ids = [event.token_ids async for event in events]
        return len(ids[-1])  # of the completion

    return await _rate(count_tokens, len(streams.prompts))


async def _rate(count_tokens: Callable[[int], Awaitable[int]], count: int) -> float:
    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(count_tokens, range(count))))
    return tokens / (time.perf_counter() - started)


async def from_server(address: str, streams: Streams) -> tuple[float, float]:
    """Tokens a second of streams over HTTP, and the share of the time in which this thread, which
    serves, computed.

    Raises RuntimeError if a request fails.
    """
    host, _, port = address.removeprefix("http://").partition(":")
    command = [sys.executable, "-m", "jaxspec.commands.bench.http_clients", host, port]
    pipe, before = asyncio.subprocess.PIPE, time.thread_time()
    clients = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    shown, _ = await clients.communicate(json.dumps(streams.bodies()).encode())
    if clients.returncode:
        raise RuntimeError("the clients failed")
    found = json.loads(shown)
    busy = (time.thread_time() - before) / found["seconds"]
    return found["tokens"] / found["seconds"], busy


@asynccontextmanager
async def serving(llm: AsyncLLM, metrics: Metrics) -> AsyncIterator[str]:
    """A server for as long as a ``with`` block lasts; its address. The AsyncLLM ends with it."""
    service = Service(names=("bench",))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve(
            make_app(service, metrics),
            service,
            lambda: llm,
            endpoint=Endpoint(),
            drain_seconds=10,
            on_ready=ready.set_result,
        )
    )
    await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result() if ready.done() else await ready
    finally:
        signal.raise_signal(signal.SIGTERM)  # the server's own way to end
        await server


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    console, rates = progress_console(), {name: list[float]() for name in NAMES}
    busy: list[float] = []
    config = EngineConfig(
        max_rows=arguments.streams, rounds_per_call=arguments.rounds_per_call, trees=True
    )
    console.print("loading")
    llm = LLM(arguments.model, arguments.drafter, engine=config)
    console.print("compiling")
    sampling = SamplingParams(max_tokens=arguments.new_tokens, temperature=1.0, ignore_eos=True)
    compile_by_running(llm.engine, arguments.streams, PROMPT_TOKENS, sampling)
    llm.engine.programs.sealed = True
    vocab = llm.params.target.config.vocab_size
    metrics = Metrics("bench")
    metrics.watch(llm.engine)
    async_llm = AsyncLLM(llm, on_chunk=metrics.observe)
    async with serving(async_llm, metrics) as address:
        for run in range(arguments.repeats + 1):
            engine = await from_engine(async_llm, Streams(arguments, vocab, 3 * run))
            text = await from_text(async_llm, Streams(arguments, vocab, 3 * run + 1))
            http, share = await from_server(address, Streams(arguments, vocab, 3 * run + 2))
            found = engine, text, http
            console.print(
                ", ".join(f"{name} {rate:,.0f}" for name, rate in zip(NAMES, found, strict=True))
            )
            if run:  # the first one warms up
                for name, rate in zip(NAMES, found, strict=True):
                    rates[name].append(rate)
                busy.append(share)
    metrics.close()
    turns = {name: np.divide(values, rates["engine"]).tolist() for name, values in rates.items()}
    shares = {name: statistics.median(values) for name, values in turns.items()}
    options = {"streams": arguments.streams, "new_tokens": arguments.new_tokens}
    return {**run_facts(), **options, "tokens_per_second": rates} | {
        "of_engine": shares,
        "of_engine_by_turn": turns,
        "server_thread_busy": statistics.median(busy),
    }


def make_table(results: dict[str, Any]) -> Table:
    busy = f"the server's thread computes {results['server_thread_busy']:.1%} of the time"
    table = Table(title=f"{results['streams']} streams on {results['device']}", caption=busy)
    for heading in ("", "tokens/s", "lowest", "highest", "of the engine's, in its turn"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, text in zip(NAMES, MEANING, strict=True):
        values = results["tokens_per_second"][name]
        figures = [
            f"{value:,.0f}" for value in (statistics.median(values), min(values), max(values))
        ]
        table.add_row(text, *figures, f"{results['of_engine'][name]:.1%}")
    return table


def run(arguments: argparse.Namespace) -> None:
    results = asyncio.run(measure(arguments))
    show_results(results, make_table(results), as_json=arguments.json)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments, expected=(ValueError, OSError, RuntimeError))
