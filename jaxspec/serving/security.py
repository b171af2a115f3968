"""Middleware that refuses requests early: without a key, too many, too large or too slow."""

import asyncio
import contextlib
import hmac
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serving.errors import ApiError
from jaxspec.serving.rates import Rates

PAGE = ("/", "/style.css", "/tree.js", "/app.js")
OPEN = (*PAGE, "/health", "/ping", "/version", "/metrics", "/load")  # need no key
MOST_BYTES = 8 * 2**20  # of a body; while JSON is read, nobody else is served
MOST_SECONDS = 60.0  # until all of it has come
REST_SECONDS = 0.5  # for what still comes of a request that is refused
CLIENT = "jaxspec.client"  # in a request's scope, see client_of


def is_open(scope: Scope) -> bool:
    """Whether a request needs no key. Its path is compared as routes are: without the prefix that a
    proxy, or an application that this one is mounted in, has put before it."""
    return get_route_path(scope) in OPEN


class ApiKeys:
    """Asks for ``Authorization: Bearer KEY``, or ``X-Api-Key: KEY`` as Anthropic's clients send it.

    The comparison takes the same time for every key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope):
            await self._app(scope, receive, send)
            return
        key = self._known_key(scope)
        if key is not None:
            await self._app({**scope, CLIENT: f"key {key}"}, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        kind, code = "authentication_error", "invalid_api_key"
        error = ApiError(401, "a valid API key is needed", kind=kind, code=code, headers=headers)
        await error.response(scope)(scope, receive, send)

    def _known_key(self, scope: Scope) -> int | None:
        """The number of the key that is given, if it is one of ours."""
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")
        equal = [hmac.compare_digest(token.strip(), key) for key in self._keys]  # all of them
        return equal.index(True) if any(equal) else None


def client_of(scope: Scope) -> str:
    """Who asks: the API key by its number; where there are none, the address."""
    address = scope.get("client")
    return scope.get(CLIENT) or (address[0] if address else "")


def key_of(scope: Scope) -> str:
    """Whose a request is: the API key by its number; where there are none, everyone's."""
    return scope.get(CLIENT, "")


class RateLimit:
    """Refuses requests of clients that have asked for too much in the last minute."""

    def __init__(self, app: ASGIApp, rates: Rates):
        self._app, self._rates = app, rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope):
            try:
                self._rates.admit(client_of(scope))
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies of more than ``most`` bytes, before they are read, and those that take more
    than ``seconds`` to come."""

    def __init__(self, app: ASGIApp, most: int = MOST_BYTES, seconds: float = MOST_SECONDS):
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > self._most:
            await take_rest(receive)
            await self._too_large().response(scope)(scope, receive, send)
            return
        read, is_whole = 0, False
        until = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal read, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else until):
                    message = await receive()
            except TimeoutError:
                raise _as_http(self._too_slow()) from None
            read += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if read > self._most:
                await take_rest(receive)
                raise _as_http(self._too_large())
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        message, headers = f"the body is larger than {self._most} bytes", {"Connection": "close"}
        return ApiError(413, message, code="too_large", headers=headers)

    def _too_slow(self) -> ApiError:
        message, headers = f"the body took more than {self._seconds:g} s", {"Connection": "close"}
        return ApiError(408, message, code="too_slow", headers=headers)


async def take_rest(receive: Receive) -> None:
    """Take what still comes, for a moment: a client that is sending when the connection closes may
    never see the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REST_SECONDS):
            while (await receive()).get("more_body"):
                pass


def _as_http(error: ApiError) -> HTTPException:
    """A body is too large or too slow, as an error that FastAPI passes on while it reads one."""
    return HTTPException(error.status, error.message, headers=error.headers)
