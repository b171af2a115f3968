"""The application: which path does what."""

import asyncio
import dataclasses
import datetime
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Security
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from jaxspec._version import __version__
from jaxspec.serving import answers, chat, completions, prepared
from jaxspec.serving.admin import Admin, make_admin
from jaxspec.serving.anthropic import prepare as messages
from jaxspec.serving.draining import Draining
from jaxspec.serving.errors import (
    MESSAGES,
    MODELS,
    REQUEST_ID,
    add_handlers,
    ascii_json,
    is_anthropic,
)
from jaxspec.serving.list_pages import page
from jaxspec.serving.listeners import Listeners
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.protocol.base import ErrorResponse, FieldError
from jaxspec.serving.protocol.chat import ChatRequest, ChatResponse
from jaxspec.serving.protocol.completions import CompletionRequest, CompletionResponse
from jaxspec.serving.protocol.messages import (
    CountRequest,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from jaxspec.serving.protocol.models import (
    AnthropicModel,
    AnthropicModelList,
    ModelCard,
    ModelList,
    StopToken,
)
from jaxspec.serving.protocol.responses import (
    DeletedResponse,
    InputItems,
    ResponseObject,
    ResponsesRequest,
)
from jaxspec.serving.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from jaxspec.serving.rates import Rates
from jaxspec.serving.request_ids import HEADER, RequestIds
from jaxspec.serving.responses import prepare as responses
from jaxspec.serving.responses.store import ResponseStore
from jaxspec.serving.sampling import check_length
from jaxspec.serving.security import (
    MOST_BYTES,
    MOST_SECONDS,
    PAGE,
    ApiKeys,
    BodyLimit,
    RateLimit,
    key_of,
)
from jaxspec.serving.service import Service
from jaxspec.serving.streaming import (
    EVENTS,
    Chunks,
    ClientGone,
    EventStream,
    TypedEvents,
    until_gone,
)
from jaxspec.serving.tracing import Spans

FOLDER = Path(__file__).parent / "page"
# Fields of `/tokenize` for messages alone.
OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
CLIENT_GONE = 499  # nobody sees it but the log
# For the OpenAPI document; ApiKeys looks at the keys, before anything of a request is read.
API_KEY = HTTPBearer(scheme_name="api_key", description="an API key", auto_error=False)
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse},
    "5XX": {"model": ErrorResponse},
}
EVENT = {  # one of a stream
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENTS: {"itemSchema": EVENT}}}}


@dataclasses.dataclass(frozen=True)
class AppOptions:
    """What an application is told beside its service.

    Attributes:
      api_keys: of which one must be given; none: everyone is served.
      max_body: most bytes of a request.
      body_seconds: most seconds until all of it has come.
      rates: what each client may ask for in a minute; None: as much as it likes.
      cors_origins: other origins whose pages may ask this server, such as https://example.org;
        "*": all. None: pages of this server alone.
      access_log: write a line for each request; see RequestIds.
      spans: told of each request that generates; None: nobody is.
      store: of responses; None: one of the usual size.
      admin_key: with which the server may be paused, and given other weights; None: it may not.
    """

    api_keys: Sequence[str] = ()
    max_body: int = MOST_BYTES
    body_seconds: float = MOST_SECONDS
    rates: Rates | None = None
    cors_origins: Sequence[str] = ()
    access_log: bool = False
    spans: Spans | None = None
    store: ResponseStore | None = None
    admin_key: str | None = None


def make_app(service: Service, metrics: Metrics, options: AppOptions | None = None) -> FastAPI:
    """The application of a service.

    ``metrics``: of the service; its ``observe`` must be the AsyncLLM's on_chunk. With replicas, it
    has a member for each of them.
    """
    options = options or AppOptions()
    rates, store = options.rates or Rates(), options.store
    app = FastAPI(
        title="jaxspec", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS
    )
    add_handlers(app, metrics.rejected)
    _add_status(app, service, metrics)
    _add_page(app)
    keyed = APIRouter(dependencies=[Security(API_KEY)] if options.api_keys else [])
    _add_models(keyed, service)
    listeners = Listeners(rates, options.spans or Spans())
    _add_generation(keyed, service, listeners)
    _add_messages(keyed, service, listeners)
    _add_responses(keyed, service, listeners, ResponseStore() if store is None else store)
    _add_tokens(keyed, service)
    app.include_router(keyed)
    app.add_middleware(BodyLimit, most=options.max_body, seconds=options.body_seconds)
    app.add_middleware(RateLimit, rates=rates)
    app.add_middleware(Draining, service=service)
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys)
    if options.admin_key is not None:
        app.add_middleware(Admin, admin=make_admin(service), key=options.admin_key)
    if options.cors_origins:  # outside of the keys: browsers ask without one before they send it
        methods = ("DELETE", "GET", "POST")
        headers = ("Authorization", "Content-Type", "X-Api-Key", HEADER)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=methods,
            allow_headers=headers,
            expose_headers=("Retry-After", HEADER),
        )
    app.add_middleware(RequestIds, log=options.access_log)
    return app


def _add_status(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.head("/health")
    @app.head("/ping")
    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        service.check()  # or the state, and 503
        programs = {**dataclasses.asdict(service.warm_up), "compiling": service.compiling}
        return JSONResponse({"status": service.state, "warm_up": programs})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": service.under_way})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        if service.is_loaded:
            for llm, member in zip(service.llm.replicas, metrics.members, strict=True):
                await llm.run(member.read)
                member.failed(llm.engine.failures)
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: APIRouter, service: Service) -> None:
    def card(name: str) -> ModelCard:
        """With the model's stop tokens, and the token that ends a turn of chats."""
        llm, turn_end = service.llm.llm, service.turn_end()
        stops = [
            StopToken(id=token, text=llm.detokenize([token]), chats_only=token in turn_end)
            for token in (*llm.params.target.config.stop_token_ids, *turn_end)
        ]
        length = service.max_length
        return ModelCard(id=name, created=service.created, max_model_len=length, stop_tokens=stops)

    def anthropic_card(name: str) -> AnthropicModel:
        created = datetime.datetime.fromtimestamp(service.created, datetime.UTC)
        created_at, length = created.isoformat().replace("+00:00", "Z"), service.max_length
        return AnthropicModel(
            id=name,
            display_name=name,
            created_at=created_at,
            max_input_tokens=length,
            max_tokens=length if service.max_new_tokens is None else service.max_new_tokens,
        )

    @app.get(MODELS)
    async def list_models(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> ModelList | AnthropicModelList:
        """The fields of the query are Anthropic's."""
        if not is_anthropic(request.scope):
            return ModelList(data=[card(name) for name in service.names])
        cards = [anthropic_card(name) for name in service.names]
        at = {"after_id": after_id, "before_id": before_id}
        shown, told = page(cards, service.names, limit, **at)
        return AnthropicModelList(data=shown, **told)

    @app.get(f"{MODELS}/{{name:path}}")
    async def one_model(name: str, request: Request) -> ModelCard | AnthropicModel:
        service.check(name)
        return anthropic_card(name) if is_anthropic(request.scope) else card(name)


async def respond_in_events(
    request: Request, listeners: Listeners, prepare: answers.Preparing, *, streams: bool | None
) -> Response:
    """An answer as events that name their types, or whole."""
    told = listeners.of(request)
    try:
        if streams:
            beginning = answers.begin_stream(prepare, told)
            writer, first, rest = await until_gone(request.receive, beginning)
            return EventStream(first, rest, TypedEvents(writer.failed))
        answer = await until_gone(request.receive, answers.answer(prepare, told))
        return Response(ascii_json(answer.model_dump()), media_type="application/json")
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


def _add_responses(
    app: APIRouter, service: Service, listeners: Listeners, store: ResponseStore
) -> None:
    @app.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        prepare = partial(responses.prepare, service, store, key_of(request.scope), body)
        return await respond_in_events(request, listeners, prepare, streams=body.stream)

    @app.get("/v1/responses/{name}", response_model=ResponseObject)
    async def retrieve(name: str, request: Request) -> Response:
        found = store.response(key_of(request.scope), name)
        return Response(found, media_type="application/json")

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(
        name: str,
        request: Request,
        order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> InputItems:
        items = store.items(key_of(request.scope), name)[:: 1 if order == "asc" else -1]
        shown, told = page(items, [item["id"] for item in items], limit, after=after)
        return InputItems(data=shown, **told)

    @app.delete("/v1/responses/{name}")
    async def delete(name: str, request: Request) -> DeletedResponse:
        store.remove(key_of(request.scope), name)
        return DeletedResponse(id=name)


def _add_messages(app: APIRouter, service: Service, listeners: Listeners) -> None:
    @app.post(MESSAGES, response_model=MessageObject, responses=STREAMED)
    async def write(body: MessagesRequest, request: Request) -> Response:
        prepare = partial(messages.prepare, service, body, request.scope.get(REQUEST_ID))
        return await respond_in_events(request, listeners, prepare, streams=body.stream)

    @app.post(f"{MESSAGES}/count_tokens")
    async def count(body: CountRequest) -> TokenCount:
        return TokenCount(input_tokens=await messages.count_tokens(service, body))


def _add_generation(app: APIRouter, service: Service, listeners: Listeners) -> None:
    async def respond(
        request: Request, prepare: prepared.Preparing[Any], *, streams: bool | None
    ) -> Response:
        """What goes wrong before the first chunk of a stream has a status of its own."""
        told = listeners.of(request)
        try:
            if streams:
                chunks = prepared.stream(prepare, told)
                first = await until_gone(request.receive, anext(chunks))
                return EventStream(first, chunks, Chunks())
            answer = await until_gone(request.receive, prepared.answer(prepare, told))
            return Response(answer.model_dump_json(), media_type="application/json")
        except ClientGone:
            return Response(status_code=CLIENT_GONE)

    @app.post("/v1/completions", response_model=CompletionResponse, responses=STREAMED)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        prepare = partial(completions.prepare, service, body)
        return await respond(request, prepare, streams=body.stream)

    @app.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAMED)
    async def answer(body: ChatRequest, request: Request) -> Response:
        return await respond(request, partial(chat.prepare, service, body), streams=body.stream)


def _add_tokens(app: APIRouter, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        service.check(body.model)
        length = service.max_length
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("prompt", "give prompt or messages")
        defaults = TokenizeRequest.model_fields
        of_chats = [name for name in OF_CHATS if getattr(body, name) != defaults[name].default]
        if body.prompt is not None and of_chats:
            raise FieldError(of_chats[0], f"{of_chats[0]} belongs to messages")
        if body.prompt is not None:
            check_length("prompt", body.prompt, length)
            special = body.add_special_tokens is not False
            [ids] = await asyncio.to_thread(
                service.llm.llm.tokenize, [body.prompt], special=special
            )
        elif body.add_special_tokens:
            raise FieldError("add_special_tokens", "the chat template has the special tokens")
        else:
            fields = body.model_dump(include={"messages", *OF_CHATS})
            ids = await chat.prompt_ids(service, ChatRequest.model_validate(fields))
        texts = [service.texts.of(token) for token in ids] if body.return_token_strs else None
        return TokenizeResponse(tokens=ids, count=len(ids), max_model_len=length, token_strs=texts)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        service.check(body.model)
        check_length("tokens", body.tokens, service.max_length)
        most = service.llm.llm.params.target.config.vocab_size
        if any(token >= most for token in body.tokens):
            raise FieldError("tokens", f"tokens has one outside 0..{most - 1}")
        return DetokenizeResponse(prompt=service.llm.llm.detokenize(body.tokens))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        tokenizer = await asyncio.to_thread(lambda: service.llm.llm.tokenizer)  # may load files
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            unk_token=tokenizer.unk_token,
            chat_template=service.template(),
        )


def _add_page(app: FastAPI) -> None:
    """Static files; they ask nobody but this server."""
    for path in PAGE:
        file = FOLDER / (path.removeprefix("/") or "index.html")
        app.add_route(path, lambda _, file=file: FileResponse(file), include_in_schema=False)
