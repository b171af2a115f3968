"""Streams of server-sent events, and clients that go away."""

import asyncio
import contextlib
import dataclasses
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxspec.serving.errors import ApiError, api_error, ascii_json

EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"
STREAM_ENDS = "jaxspec.stream_ends"  # in a request's scope, see StreamEnds


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


type Event = Mapping[str, Any]  # with its "type"


class Framing(Protocol):
    """How an API writes streams."""

    def event(self, content: Any) -> bytes:
        """One event."""
        ...

    def ending(self) -> bytes:
        """What comes after the last event."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        ...


class Chunks:
    """OpenAI's chats and completions: responses, then ``[DONE]``."""

    def event(self, content: BaseModel) -> bytes:
        return _data(content.model_dump_json())

    def ending(self) -> bytes:
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return _data(ascii_json(error.body())) + DONE


class TypedEvents:
    """Events that name their types.

    Args:
      failed: the events that end a stream with an error.
    """

    def __init__(self, failed: Callable[[ApiError], Iterable[Event]]):
        self._failed = failed

    def event(self, content: Event) -> bytes:
        return b"event: " + content["type"].encode() + b"\n" + _data(ascii_json(content))

    def ending(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return b"".join(map(self.event, self._failed(error)))


@dataclasses.dataclass
class StreamEnds:
    """Tells the middleware that cuts a stream how to end it; in a request's scope."""

    failure: Callable[[ApiError], bytes] = Chunks().failure


class EventStream(StreamingResponse):
    """Server-sent events.

    The first one's content is known already: its errors had a status of their own. A later error is
    an event. When the client goes away, the generator is closed, which cancels its requests.
    """

    def __init__(self, beginning: Any, rest: AsyncGenerator[Any, None], framing: Framing):
        self._rest, self._framing = rest, framing
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        content = self._events(beginning)
        super().__init__(content, media_type=EVENTS, headers=headers)

    async def _events(self, beginning: Any) -> AsyncGenerator[bytes, None]:
        try:
            yield self._framing.event(beginning)
            async for content in self._rest:
                yield self._framing.event(content)
        except Exception as error:
            yield self._framing.failure(api_error(error))
        else:
            if ending := self._framing.ending():
                yield ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if STREAM_ENDS in scope:
            scope[STREAM_ENDS].failure = self._framing.failure
        try:
            with contextlib.suppress(ClientGone, OSError):
                await until_gone(receive, self.stream_response(send))
        finally:
            await self._rest.aclose()


def _data(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"
