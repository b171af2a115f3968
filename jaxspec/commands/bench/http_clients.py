"""Clients of `jaxspec bench http`: streams over plain sockets, which cost them next to nothing.

Run as a module, in a process of its own: it reads bodies of requests from stdin, as a JSON list,
sends them all at once, and prints what came back. Imports no jax.
"""

import asyncio
import json
import sys
import time

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\nConnection: close\r\n\r\n"
)
LAST = 4096  # bytes at the end of an answer, in which its usage stands


async def stream(host: str, port: int, body: bytes) -> int:
    """The tokens of an answer whose last event has its usage. Raises RuntimeError for another."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HEAD.format(len(body)).encode() + body)
    first = await reader.readline()
    end = first
    while piece := await reader.read(2**16):
        end = (end + piece)[-LAST:]
    writer.close()
    events = [line for line in end.splitlines() if line.startswith(b'data: {"id"')]
    usage = json.loads(events[-1].removeprefix(b"data: "))["usage"] if events else None
    if b" 200 " not in first or usage is None:
        raise RuntimeError(f"a request failed: {end.decode(errors='replace')[-200:]}")
    return usage["completion_tokens"]


async def streams(host: str, port: int, bodies: list[bytes]) -> dict[str, float]:
    """Tokens of all, and seconds until the last one had ended."""
    started = time.perf_counter()
    tokens = await asyncio.gather(*(stream(host, port, body) for body in bodies))
    return {"tokens": sum(tokens), "seconds": time.perf_counter() - started}


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    bodies = [json.dumps(body).encode() for body in json.load(sys.stdin)]
    print(json.dumps(asyncio.run(streams(host, port, bodies))))


if __name__ == "__main__":
    main()
