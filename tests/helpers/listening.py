"""A server that a thread runs, for clients that are programs, or wait for their answers."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jaxspec import LLM
from tests.helpers.served import Served

KEY = "secret"  # that tests give such servers


class Listening:
    """A server and where it listens.

    Attributes:
      root: without a slash at its end.
      server: what it serves, for tests that change it between requests.
    """

    def __init__(self, root: str, server: Served):
        self.root, self.server = root, server

    @property
    def url(self) -> str:
        """As OpenAI's clients want it."""
        return f"{self.root}/v1"

    def samples(self, **defaults: Any) -> None:
        """From now on these are the defaults of sampling."""
        self.server.service.sampling_defaults = defaults


@contextlib.contextmanager
def listening(llm: LLM, **options: Any) -> Iterator[Listening]:
    """A server with these options of Served, until the end of the ``with`` block."""
    ready, found = threading.Event(), list[Listening]()
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        end = asyncio.Event()
        async with Served(llm, **options) as server, server.address() as (host, port):
            ends.append((asyncio.get_running_loop(), end))
            found.append(Listening(f"http://{host}:{port}", server))
            ready.set()
            await end.wait()

    def in_thread() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    ready.wait()
    if not found:
        raise RuntimeError("the server did not start")
    try:
        yield found[0]
    finally:
        [(loop, end)] = ends
        loop.call_soon_threadsafe(end.set)
        thread.join()
