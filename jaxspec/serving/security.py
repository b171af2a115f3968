"""Middleware that refuses requests early: without a key, or too large."""

import hmac
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serving.errors import ApiError

PAGE = ("/", "/style.css", "/tree.js", "/app.js")
OPEN = (*PAGE, "/health", "/ping", "/version", "/metrics")  # paths that need no key
MOST_BYTES = 16 * 2**20  # of a body


class ApiKeys:
    """Asks for ``Authorization: Bearer KEY``. The comparison takes the same time for every key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        kind, code = "authentication_error", "invalid_api_key"
        error = ApiError(401, "a valid API key is needed", kind=kind, code=code, headers=headers)
        await error.response()(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        equal = [hmac.compare_digest(token.strip(), key) for key in self._keys]  # all of them
        return scheme.lower() == b"bearer" and any(equal)


class BodyLimit:
    """Refuses bodies of more than ``most`` bytes, before they are read."""

    def __init__(self, app: ASGIApp, most: int = MOST_BYTES):
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > self._most:
            await self._error().response()(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:  # of the kind that FastAPI passes on while it reads a body
                raise HTTPException(413, self._error().message)
            return message

        await self._app(scope, limited, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most} bytes", code="too_large")
