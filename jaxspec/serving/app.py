"""The application: which path does what."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from jaxspec.serving import chat, completions, models, tokens
from jaxspec.serving.errors import ApiError, add_handlers
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.protocol.chat import ChatRequest, ChatResponse
from jaxspec.serving.protocol.completions import CompletionRequest, CompletionResponse
from jaxspec.serving.protocol.models import ModelCard, ModelList
from jaxspec.serving.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxspec.serving.security import MOST_BYTES, PAGE, ApiKeys, BodyLimit
from jaxspec.serving.service import Service
from jaxspec.serving.streaming import ClientGone, EventStream, first, until_gone
from jaxspec.version import __version__

FOLDER = Path(__file__).parent / "page"
CLIENT_GONE = 499  # nobody sees it but the log


def make_app(
    service: Service,
    metrics: Metrics,
    *,
    api_keys: Sequence[str] = (),
    max_body: int = MOST_BYTES,
) -> FastAPI:
    """The application of a service.

    Args:
      metrics: of the service; its ``observe`` must be the AsyncLLM's on_chunk. With replicas, it
        has a member for each of them.
      api_keys: of which one must be given; none: everyone is served.
      max_body: most bytes of a request.
    """
    app = FastAPI(title="jaxspec", version=__version__, docs_url=None, redoc_url=None)
    add_handlers(app, metrics.rejected)
    _add_status(app, service, metrics)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_page(app)
    app.add_middleware(BodyLimit, most=max_body)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    return app


def _add_status(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        _ = service.llm  # or the state, and 503
        return JSONResponse({"status": service.state})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        if service.state == "ready":
            for llm, own in zip(service.llm.replicas, metrics.members, strict=True):
                await llm.run(own.read)
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return models.model_list(service)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> ModelCard:
        service.check_model(name)
        return next(card for card in models.model_list(service).data if card.id == name)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=CompletionResponse)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        if body.stream:
            return await _streamed(request, completions.stream(service, body))
        return await _answered(request, completions.complete(service, body))

    @app.post("/v1/chat/completions", response_model=ChatResponse)
    async def answer(body: ChatRequest, request: Request) -> Response:
        if body.stream:
            return await _streamed(request, chat.stream(service, body))
        return await _answered(request, chat.chat(service, body))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        return await tokens.tokenize(service, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        return await tokens.detokenize(service, body)


def _add_page(app: FastAPI) -> None:
    """Static files; they ask nobody but this server."""
    for path in PAGE:
        name = path.removeprefix("/") or "index.html"
        app.get(path, include_in_schema=False)(_shows(FOLDER / name))


def _shows(file: Path) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def show() -> Response:
        return FileResponse(file)

    return show


async def _answered(request: Request, work: Coroutine[Any, Any, BaseModel]) -> Response:
    try:
        answer = await until_gone(request.receive, work)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _streamed(request: Request, chunks: AsyncGenerator[BaseModel, None]) -> Response:
    """What goes wrong before the first chunk has a status of its own."""
    try:
        beginning = await until_gone(request.receive, first(chunks))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    except StopAsyncIteration:
        raise ApiError(500, "nothing was generated", kind="server_error") from None
    return EventStream(beginning, chunks)
