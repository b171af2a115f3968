"""Ids of requests: each answer has one, and so has its line in the log."""

import logging
import re
import time
import urllib.parse
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serving.errors import REQUEST_ID
from jaxspec.serving.security import client_of

HEADER = "X-Request-Id"
HEADERS = (HEADER.lower().encode(), b"request-id")  # OpenAI's clients read the first
GIVEN = re.compile(r"[!-~]{1,128}")  # what clients may give; no blank, so that it is one word
logger = logging.getLogger("jaxspec.access")


class RequestIds:
    """Middleware that gives each answer the id of its request, the client's if it has sent one.

    Args:
      log: write a line for each request when its answer has ended: who asked for what, the status,
        the seconds, and the id.
    """

    def __init__(self, app: ASGIApp, log: bool = False):
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if GIVEN.fullmatch(given) else uuid.uuid4().hex
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(header, request_id.encode()) for header in HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        try:
            await self._app({**scope, REQUEST_ID: request_id}, receive, send_with_id)
        finally:
            if self._log:
                seconds = time.perf_counter() - started
                path = urllib.parse.quote(scope["path"])  # decoded, it may hold an end of line
                who, what = client_of(scope) or "-", f"{scope['method']} {path}"
                logger.info("%s %s %d %.3f s %s", who, what, status, seconds, request_id)
