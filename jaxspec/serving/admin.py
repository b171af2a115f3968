"""What who runs a server may do to it: pause it, and give it other weights.

For reinforcement learning, under the names of vLLM and SGLang. The routes are an application of
their own, which is there only if there is a key for it.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from pydantic import Field
from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.decoding.all_reduce_buffers import replacement
from jaxspec.decoding.drafters import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.weights.in_flight import InFlight
from jaxspec.models.decoder import Decoder
from jaxspec.serving.draining import all_end
from jaxspec.serving.errors import ApiError, add_handlers
from jaxspec.serving.protocol.base import RequestBody, ResponseBody
from jaxspec.serving.service import Service

type Mode = Literal["abort", "wait", "keep"]
type Policy = Literal["finish", "restart", "repair"]

FIRST_VERSION = "default"
PAUSE = 0.05  # seconds between two looks whether requests have ended


class WeightsFromDisk(RequestBody):
    """SGLang's; ``draft_model_path`` is for a drafter, which else keeps its weights.

    ``in_flight``: requests are taken all the time, and those under way finish, or begin again where
    nothing of them was sent (see Engine.use_target). None: they end first, and none is taken.
    """

    model_path: str
    draft_model_path: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: str | None = None
    in_flight: Policy | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    flush_cache: Literal[True] = True  # what old weights have written would be wrong
    is_async: Literal[False] = False


class NewVersion(RequestBody):
    new_version: str


class Aborted(RequestBody):
    """vLLM's: all requests. One alone ends when its client goes away."""

    request_ids: list[str] | None = Field(None, max_length=0)


class Ended(ResponseBody):
    status: Literal["aborted"] = "aborted"
    aborted: int


class Version(ResponseBody):
    weight_version: str | None


class Done(ResponseBody):
    success: bool = True
    message: str
    weight_version: str | None = None


class Paused(ResponseBody):
    is_paused: bool


class Control:
    """Pauses a service, and changes its weights. One thing at a time is done."""

    def __init__(self, service: Service):
        self._service, self._lock = service, asyncio.Lock()
        self._kept, self._updates = False, 0

    @property
    def is_paused(self) -> bool:
        return self._service.paused or self._kept

    async def pause(self, mode: Mode) -> None:
        """Take no requests until ``resume``, and end those under way (``abort``), or wait for them.

        ``keep``: they, and those that come, stay as they are.
        """
        async with self._lock:
            await self._pause(mode)

    async def resume(self) -> None:
        """Take requests again; a ``pause`` that still waits ends."""
        for llm in self._service.llm.replicas:
            await llm.engine.pause(False)
        self._kept = self._service.paused = False

    def abort(self) -> int:
        """End what is under way, and go on taking requests: the number of requests that ended."""
        under_way = self._service.under_way
        for llm in self._service.llm.replicas:
            llm.engine.abort_all()
        return under_way

    async def reset_prefix_cache(self) -> None:
        """Raises ApiError while requests are under way."""
        async with self._lock:
            await self._each(Engine.forget_texts)

    async def update(self, asked: WeightsFromDisk) -> None:
        """Serve other weights. They are loaded beside those in use, while these serve.

        Raises ApiError for weights that cannot be used.
        """
        async with self._lock:
            if self._kept:
                message = "requests are kept under way: resume, or pause with mode wait or abort"
                raise ApiError(409, message, code="requests_under_way")
            if asked.in_flight is not None and (asked.abort_all_requests or asked.keep_pause):
                message = "in_flight does not pause: leave out abort_all_requests and keep_pause"
                raise ApiError(400, message, param="in_flight")
            llms = self._service.llm.replicas
            number = 1 + max(llm.llm.engine.weights.newest.version for llm in llms)
            name = asked.weight_version or str(self._updates + 1)
            for llm in llms:
                loading = llm.llm.load_weights, asked.model_path, asked.draft_model_path
                weights = NewWeights(*await asyncio.to_thread(*loading), number)

                def use(engine: Engine, weights: NewWeights = weights) -> None:
                    weights.use(engine, asked.in_flight or "refuse")
                    self._service.name_weights(number, name)  # before the first answer

                pausing = self._while_paused(asked)
                async with pausing if asked.in_flight is None else contextlib.nullcontext():
                    await llm.engine.change_weights(use)
            self._updates += 1
            self._service.use_version(name)

    def use_version(self, version: str) -> None:
        self._service.use_version(version)

    @contextlib.asynccontextmanager
    async def _while_paused(self, asked: WeightsFromDisk) -> AsyncIterator[None]:
        """No request is under way inside of the ``with`` block."""
        was_paused = self._service.paused
        await self._pause("abort" if asked.abort_all_requests else "wait")
        try:
            yield
        finally:
            if not (was_paused or asked.keep_pause):
                await self.resume()

    async def _pause(self, mode: Mode) -> None:
        service = self._service
        if mode == "keep":
            for llm in service.llm.replicas:
                await llm.engine.pause()
            self._kept = True
            return
        if self._kept:  # else they would never end
            await self.resume()
        service.paused = True
        while service.paused and not await all_end(service, PAUSE):
            if mode == "abort":  # also those that were not in the engine yet
                for llm in service.llm.replicas:
                    llm.engine.abort_all()

    async def _each(self, function: Any) -> None:
        """Call a function of each engine. Raises ApiError if it may not be called now."""
        for llm in self._service.llm.replicas:
            try:
                await llm.run(function)
            except RuntimeError as error:
                raise ApiError(409, str(error), code="requests_under_way") from error


class NewWeights(NamedTuple):
    """Weights for an engine, and the version that it calls them."""

    target: Decoder
    drafter: Drafter | None
    version: int

    def use(self, engine: Engine, in_flight: InFlight) -> None:
        """Raises ValueError for weights of other shapes; then those in use stay."""
        if self.drafter is not None:
            replacement(engine.params.drafter, self.drafter)  # so that both fit, or neither
        engine.use_target(self.target, version=self.version, in_flight=in_flight)
        if self.drafter is not None:
            engine.use_drafter(self.drafter, in_flight=in_flight)


def make_admin(service: Service) -> FastAPI:
    """The routes. Their errors are those of other routes."""
    app, control = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), Control(service)
    add_handlers(app, lambda: None)
    service.weight_version = FIRST_VERSION

    @app.post("/pause")
    async def pause(mode: Mode = "abort", clear_cache: bool = True) -> Paused:
        await control.pause(mode)
        if clear_cache and mode != "keep":
            await control.reset_prefix_cache()
        return Paused(is_paused=True)

    @app.post("/resume")
    async def resume() -> Paused:
        await control.resume()
        return Paused(is_paused=False)

    @app.post("/abort_requests")
    async def abort(body: Aborted) -> Ended:
        return Ended(aborted=control.abort())

    @app.get("/is_paused")
    async def is_paused() -> Paused:
        return Paused(is_paused=control.is_paused)

    @app.post("/reset_prefix_cache")
    async def reset() -> Done:
        await control.reset_prefix_cache()
        return _done("the prefix cache is empty")

    @app.post("/update_weights_from_disk")
    async def update(body: WeightsFromDisk) -> Done:
        await control.update(body)
        return _done(f"the weights are those of {body.model_path}")

    @app.post("/update_weight_version")
    async def update_version(body: NewVersion) -> Done:
        control.use_version(body.new_version)
        return _done("the weights have another version")

    @app.get("/get_weight_version")
    async def version() -> Done:
        return _done("the version of the weights")

    @app.get("/weight_info")
    async def weight_info() -> Version:
        return Version(weight_version=service.version_in_use)

    def _done(message: str) -> Done:
        return Done(message=message, weight_version=service.version_in_use)

    return app


class Admin:
    """Middleware that passes on to the admin's routes who has the admin's key."""

    PATHS = frozenset(
        {
            *("/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache"),
            *("/update_weights_from_disk", "/update_weight_version", "/get_weight_version"),
            "/weight_info",
        }
    )

    def __init__(self, app: ASGIApp, admin: ASGIApp, key: str):
        self._app, self._admin, self._key = app, admin, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or get_route_path(scope) not in self.PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        is_equal = hmac.compare_digest(token.strip(), self._key)
        if scheme.lower() == b"bearer" and is_equal:
            await self._admin(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        kind, code = "authentication_error", "invalid_api_key"
        error = ApiError(401, "the admin's key is needed", kind=kind, code=code, headers=headers)
        await error.response(scope)(scope, receive, send)
