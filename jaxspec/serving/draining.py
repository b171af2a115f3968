"""The end of a server: new requests are refused, and those under way end in order.

The listener stays open meanwhile, so that clients and load balancers read status 503 and go
elsewhere, where a closed port would look like a crash.
"""

import asyncio
import contextlib
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serving.errors import CutShort, NotReady
from jaxspec.serving.security import is_open, take_rest
from jaxspec.serving.service import Service
from jaxspec.serving.streaming import EVENTS, STREAM_ENDS, StreamEnds, until

logger = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # before the limit requests are cut, so that their clients can be told
PAUSE = 0.05  # seconds between two looks whether requests are under way


class Draining:
    """Middleware that refuses requests of a server that ends or is paused, and cuts those under way
    in the end.

    A request that has no answer yet then gets status 503; a stream gets an event with the error,
    and its last one.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        if scope["type"] != "http" or is_open(scope):
            await self._app(scope, receive, send)
        elif service.state == "ending" or service.paused:
            await take_rest(receive)
            ends = service.state == "ending"
            error = NotReady("ending", {"Connection": "close"}) if ends else NotReady("paused")
            await error.response(scope)(scope, receive, send)
        else:
            service.under_way += 1
            try:
                await self._until_cut(scope, receive, send)
            finally:
                service.under_way -= 1

    async def _until_cut(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        app = self._app({**scope, STREAM_ENDS: answer.ends}, receive, answer.send)
        async with until(app, self._service.cut.wait()) as work:
            if work.done() or not answer.can_be_cut:
                await work
                return
        if not answer.can_be_cut:  # its last part went out while it was cancelled
            return
        with contextlib.suppress(TimeoutError):  # a client that does not read
            async with asyncio.timeout(CUT_SECONDS / 2):
                await answer.cut(scope, receive)


class _Answer:
    """How much of an answer has been sent."""

    def __init__(self, send: Send):
        self._send, self.ends = send, StreamEnds()
        self._has_begun = self._is_stream = self._is_whole = False

    @property
    def can_be_cut(self) -> bool:
        """An answer that is no stream is sent at once."""
        return not self._has_begun or (self._is_stream and not self._is_whole)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(EVENTS.encode())
        elif message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)
        await self._send(message)

    async def cut(self, scope: Scope, receive: Receive) -> None:
        """Send the error instead of what is missing; the application sends no more."""
        error = CutShort()
        if self._has_begun:
            await self.send({"type": "http.response.body", "body": self.ends.failure(error)})
        else:
            await error.response(scope)(scope, receive, self.send)


async def drain(service: Service, seconds: float) -> None:
    """Refuse new requests, and wait until those under way have ended.

    What has not ended CUT_SECONDS before the limit of so many seconds is cut. Both are logged: who
    pressed Ctrl-C sees what is waited for.
    """
    service.state = "ending"
    limit = max(seconds - CUT_SECONDS, seconds / 2)
    if service.under_way:
        text = "requests under way: %d, which are cut after %g s, or by a second signal"
        logger.warning(text, service.under_way, limit)
    if not await all_end(service, limit):
        count = service.under_way
        service.cut.set()
        logger.warning("after %g s requests under way were cut: %d", limit, count)
        await all_end(service, CUT_SECONDS)


async def all_end(service: Service, seconds: float) -> bool:
    """Whether no request is under way, at the latest after so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while service.under_way:
                await asyncio.sleep(PAUSE)
    return not service.under_way
