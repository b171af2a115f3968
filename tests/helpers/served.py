"""A tiny model behind the application, and OpenAI's own client in front of it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import httpx
import openai

from jaxspec import LLM
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.serving.app import AppOptions, make_app
from jaxspec.serving.endpoint import Endpoint
from jaxspec.serving.lifecycle import make_server
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.service import Service

MODEL = "tiny"
APP_OPTIONS = ("api_keys", "max_body", "body_seconds", "rates", "cors_origins", "access_log")
APP_OPTIONS += ("spans", "admin_key", "store")
TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Of a request as it is sent, with the length of its body.
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


class Served:
    """An application and its clients, for the length of a ``with`` block.

    With ``replicas``, further models like the first share its work.
    """

    def __init__(self, llm: LLM, replicas: Sequence[LLM] = (), **options: Any):
        self.metrics = Metrics(MODEL)
        app_options = {name: options.pop(name) for name in APP_OPTIONS if name in options}
        options.setdefault("chat_template", TEMPLATE)
        self.service = Service(names=(MODEL,), **options)
        self.app = make_app(self.service, self.metrics, AppOptions(**app_options))
        self.llm, self.others = llm, replicas

    async def __aenter__(self) -> "Served":
        first, *others = [self._started(llm) for llm in (self.llm, *self.others)]
        self.service.start(ReplicatedLLM([first, *others]) if others else first)
        return self

    def _started(self, llm: LLM) -> AsyncLLM:
        metrics = self.metrics if llm is self.llm else self.metrics.beside()
        metrics.watch(llm.engine)
        return AsyncLLM(llm, on_chunk=metrics.observe)

    async def __aexit__(self, *_: object) -> None:
        await self.service.close()
        for metrics in self.metrics.members:
            metrics.close()

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client

    @contextlib.asynccontextmanager
    async def address(self) -> AsyncIterator[tuple[str, int]]:
        """Listens as `jaxspec serve` does: host and port."""
        async with self.listening(Endpoint()) as listening:
            yield listening.getsockname()[:2]

    @contextlib.asynccontextmanager
    async def listening(self, endpoint: Endpoint) -> AsyncIterator[socket.socket]:
        server, listening = make_server(self.app, endpoint), endpoint.listen()
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield listening
        finally:
            server.should_exit = True
            await serving
            endpoint.close()

    @contextlib.asynccontextmanager
    async def client(self, api_key: str = "none") -> AsyncIterator[Any]:
        """OpenAI's. Its types do not know the further fields."""
        async with self.http() as http:
            own: Any = http
            yield openai.AsyncOpenAI(
                base_url="http://test/v1", api_key=api_key, http_client=own, max_retries=0
            )


def run[T](test: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(120):
            return await test

    return asyncio.run(limited())


def with_http[T](
    llm: LLM, test: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]], **options: Any
) -> T:
    """The result of a test that sends requests to a server of this model."""

    async def served() -> T:
        async with Served(llm, **options) as server, server.http() as http:
            return await test(http)

    return run(served())


def with_client[T](llm: LLM, test: Callable[[Any], Coroutine[Any, Any, T]], **options: Any) -> T:
    """The result of a test that talks to a server of this model."""

    async def served() -> T:
        async with Served(llm, **options) as server, server.client() as client:
            return await test(client)

    return run(served())


def ask(llm: LLM, *requests: Mapping[str, Any], **options: Any) -> list[Any]:
    """The answers to requests, one after the other; those with messages are chats. Of a stream, the
    list of its chunks."""

    async def test(client: Any) -> list[Any]:
        found = []
        for request in requests:
            kind = client.chat.completions if "messages" in request else client.completions
            answer = await kind.create(**request)
            found.append([one async for one in answer] if request.get("stream") else answer)
        return found

    return with_client(llm, test, **options)


def idle_pages(llm: LLM) -> bool:
    """Whether no request is left, and every page is free, or kept for others."""
    usage = llm.engine.scheduler.usage()
    return llm.engine.is_idle and usage.free + usage.idle == usage.total
