"""Streams of server-sent events, and clients that go away."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxspec.serving.errors import ApiError, api_error

EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection: nobody reads an answer."""


@contextlib.asynccontextmanager
async def until[T](work: Awaitable[T], event: Awaitable[Any]) -> AsyncIterator[asyncio.Future[T]]:
    """The task that does ``work``, once it is done or ``event`` has happened; it is cancelled at
    the end of the ``with`` block."""
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        for started in (task, other):
            started.cancel()
        await asyncio.gather(task, other, return_exceptions=True)


async def until_gone[T](receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    ``receive`` must be that of a request whose body has been read. Raises ClientGone.
    """
    async with until(work, _disconnected(receive)) as task:
        if task.done():
            return task.result()
    raise ClientGone


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of responses, then ``[DONE]``.

    The first response is known already: its errors had a status of their own. A later error is an
    event. When the client goes away, the generator is closed, which cancels its requests.
    """

    def __init__(self, beginning: BaseModel, rest: AsyncGenerator[BaseModel, None]):
        self._rest = rest
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        content = self._events(beginning)
        super().__init__(content, media_type=EVENTS, headers=headers)

    async def _events(self, beginning: BaseModel) -> AsyncGenerator[bytes, None]:
        try:
            yield _event(beginning.model_dump_json())
            async for response in self._rest:
                yield _event(response.model_dump_json())
        except Exception as error:
            yield last_events(api_error(error))
        else:
            yield DONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone, OSError):
                await until_gone(receive, self.stream_response(send))
        finally:
            await self._rest.aclose()


def last_events(error: ApiError) -> bytes:
    """What ends a stream that cannot go on."""
    return _event(error.text()) + DONE


def _event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"
