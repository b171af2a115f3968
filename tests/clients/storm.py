"""Many clients of all kinds at a running server, a tenth of whom are killed in the midst.

    jaxspec serve --port 8471 --max-length 768 --chat-template \\
        tests/clients/storm.jinja &
    python -m tests.clients.storm http://127.0.0.1:8471 --pid $! --minutes 10

Each finished answer must be that of the same request alone. The command prints what it counted and
ends with status 1 if anything was wrong.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.storm_answers import Answer, read_stream, read_whole
from tests.helpers.storm_kinds import Kind, kinds

LIMIT = 600  # seconds of a request, after which it counts as hanging
DEATHS = 0.1  # share of requests
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclasses.dataclass
class Report:
    """``pool``: what the gauges said once all had ended. ``megabytes``: of the server, each minute
    from the first."""

    finished: int = 0
    killed: int = 0
    ended_first: int = 0  # that should have been killed, and were answered before
    tokens: int = 0  # generated, of finished answers
    seconds: float = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    by_path: dict[str, int] = dataclasses.field(default_factory=dict)
    megabytes: list[int] = dataclasses.field(default_factory=list)
    pool: dict[str, float] = dataclasses.field(default_factory=dict)


async def ask(http: httpx.AsyncClient, kind: Kind, stream: bool) -> Answer:
    path, body = kind
    if not stream:
        whole = await http.post(path, json=body)
        if whole.status_code != 200:
            raise RuntimeError(f"{whole.status_code}: {whole.text}")
        return read_whole(path, whole.json())
    body = streamed(kind)
    found = await http.post(path, json=body)
    if found.status_code != 200:
        raise RuntimeError(f"{found.status_code}: {found.text}")
    return read_stream(path, found.text)


def streamed(kind: Kind) -> dict[str, Any]:
    path, body = kind
    usage = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    return {**body, "stream": True, **usage}


async def die(http: httpx.AsyncClient, kind: Kind, rng: random.Random) -> bool:
    """Close a connection in a stream, or while waiting. Whether it was before the end."""
    path = kind[0]
    if rng.random() < 0.3:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3 * rng.random()):
                await http.post(path, json=kind[1])
                return False
        return True
    left = rng.randrange(12)
    async with http.stream("POST", path, json=streamed(kind)) as answer:
        async for _ in answer.aiter_raw():
            left -= 1
            if left < 0:
                return True
    return False


async def storm(http: httpx.AsyncClient, clients: int, seconds: float, pid: int | None) -> Report:
    first = await http.post("/v1/responses", json={"input": "Begin.", "max_output_tokens": 8})
    found = first.raise_for_status().json()
    all_kinds = kinds(found["model"], found["id"])
    alone = []
    for number, kind in enumerate(all_kinds):
        alone.append(await ask(http, kind, stream=False))
        print(f"alone {number + 1} of {len(all_kinds)}", file=sys.stderr)
    report, rng, start = Report(), random.Random(0), time.monotonic()

    async def client() -> None:
        while time.monotonic() - start < seconds:
            which, stream, dies = rng.randrange(len(alone)), rng.random() < 0.5, rng.random()
            kind = all_kinds[which]
            try:
                if dies < DEATHS:
                    in_time = await die(http, kind, rng)
                    report.killed += in_time
                    report.ended_first += not in_time
                    continue
                answer = await ask(http, kind, stream)
            except Exception as error:  # whatever it is, it is told
                report.wrong.append(f"{kind}, stream {stream}: {error!r}")
                continue
            report.finished += 1
            report.by_path[kind[0]] = report.by_path.get(kind[0], 0) + 1
            report.tokens += answer.usage[1]
            if not answer.is_like(alone[which]):
                report.wrong.append(f"{kind}, stream {stream}: {answer} is not {alone[which]}")

    watch = asyncio.create_task(_watch(report, pid, start))
    await asyncio.gather(*(client() for _ in range(clients)))
    watch.cancel()
    report.seconds = time.monotonic() - start
    report.pool = await at_rest(http)
    return report


async def _watch(report: Report, pid: int | None, start: float) -> None:
    """Read the server's memory each minute."""
    while True:
        minute = len(report.megabytes) + 1
        await asyncio.sleep(start + 60 * minute - time.monotonic())
        if pid is None:
            return
        fields = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        report.megabytes.append(fields * os.sysconf("SC_PAGE_SIZE") // 2**20)
        shown = f"minute {minute}: {report.megabytes[-1]} MiB, {report.finished} finished"
        print(f"{shown}, {report.killed} killed, {len(report.wrong)} wrong", file=sys.stderr)


async def at_rest(http: httpx.AsyncClient) -> dict[str, float]:
    """The gauges, once nothing is under way, or after ten seconds."""
    for _ in range(20):
        lines = (await http.get("/metrics")).text.splitlines()
        found = {
            name: sum(
                float(line.rsplit(" ", 1)[1])
                for line in lines
                if line.startswith(f"jaxspec:{name}{{")
            )
            for name in GAUGES
        }
        if not any(found.values()):
            break
        await asyncio.sleep(0.5)
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("address", help="of the server, without /v1")
    parser.add_argument("--pid", type=int, help="of the server, whose memory is told")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args(words)

    async def run() -> Report:
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {options.api_key}"}
        async with httpx.AsyncClient(
            base_url=options.address, timeout=LIMIT, limits=limits, headers=headers
        ) as http:
            return await storm(http, options.clients, 60 * options.minutes, options.pid)

    report = asyncio.run(run())
    print(json.dumps({**dataclasses.asdict(report), "wrong": report.wrong[:20]}, indent=1))
    print(f"{report.finished} finished, {len(report.wrong)} wrong")
    return 1 if report.wrong or any(report.pool.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
