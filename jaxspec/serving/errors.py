"""Errors that clients see, in the shape of the API that they ask. None holds a path or a stack
trace."""

import itertools
import json
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from jaxspec.scheduling.plan import QueueFull
from jaxspec.serving.protocol.base import ErrorDetails, ErrorResponse, FieldError
from jaxspec.serving.protocol.unions import is_shape

logger = logging.getLogger(__name__)

RETRY_AFTER = 1  # seconds; a call of the engine takes less
MOST_MESSAGE = 500  # characters
MOST_PROBLEMS = 10  # of a body
REQUEST_ID = "jaxspec.request_id"  # in a request's scope, see request_ids
METHODS = ("DELETE", "GET", "HEAD", "POST")  # of which a path has some
MESSAGES = "/v1/messages"  # the path of Anthropic's API
MODELS = "/v1/models"  # of both
# What Anthropic calls errors with a status; others below 500 are invalid_request_error.
ANTHROPIC_KINDS: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is of Anthropic's API."""
    path, headers = get_route_path(scope), dict(scope["headers"])
    is_of_both = path == MODELS or path.startswith(f"{MODELS}/")
    return path.startswith(MESSAGES) or (is_of_both and b"anthropic-version" in headers)


class ApiError(Exception):
    """What a request is answered with. ``status`` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ):
        """``details`` are told to Anthropic's clients alone."""
        super().__init__(message)
        self.status, self.kind, self.details = status, kind, details
        is_long = len(message) > MOST_MESSAGE
        self.message = f"{message[: MOST_MESSAGE - 3]}..." if is_long else message
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        details = ErrorDetails(
            message=self.message, type=self.kind, param=self.param, code=self.code
        )
        return ErrorResponse(error=details).model_dump()

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        """In Anthropic's shape."""
        other = "api_error" if self.status > 500 else "invalid_request_error"
        kind = ANTHROPIC_KINDS.get(self.status, other)
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.details is not None:
            error["details"] = dict(self.details)
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, scope: Scope) -> Response:
        """To a request, in the shape of the API of its path."""
        anthropic = is_anthropic(scope)
        body = self.anthropic_body(scope.get(REQUEST_ID)) if anthropic else self.body()
        media_type = "application/json"
        return Response(ascii_json(body), self.status, headers=self.headers, media_type=media_type)


def ascii_json(body: Mapping[str, Any]) -> str:
    """JSON in ASCII: a message may quote what is no valid Unicode."""
    return json.dumps(body)


class NotReady(ApiError):
    """The server starts, or ends."""

    def __init__(self, state: str, headers: Mapping[str, str] | None = None):
        headers = {"Retry-After": str(RETRY_AFTER), **(headers or {})}
        message = f"the server is {state}: try again later"
        super().__init__(503, message, kind="server_error", code="not_ready", headers=headers)


class CutShort(ApiError):
    """The server ends before the request has."""

    def __init__(self):
        headers = {"Retry-After": str(RETRY_AFTER), "Connection": "close"}
        message, code = "the server is ending: ask again later", "shutting_down"
        super().__init__(503, message, kind="server_error", code=code, headers=headers)


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception."""
    match error:
        case ApiError():
            return error
        case FieldError():
            return ApiError(400, str(error), param=error.param)
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case ValueError():  # of the engine: a request that cannot be
            return ApiError(400, str(error))
        case QueueFull():
            headers = {"Retry-After": str(RETRY_AFTER)}
            message = "too many requests wait: try again later"
            kind, code = "rate_limit_error", "queue_full"
            return ApiError(429, message, kind=kind, code=code, headers=headers)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "an internal error; see the server's log", kind="server_error")


def validated[M: BaseModel](kind: type[M], body: Mapping[str, Any]) -> M:
    """A request. Raises RequestValidationError, as FastAPI does, for what is none."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = [{**details, "loc": ("body", *details["loc"])} for details in error.errors()]
        raise RequestValidationError(errors) from error


def _invalid(error: RequestValidationError) -> ApiError:
    """All that is wrong with a body, of each field the first; ``param`` is the first of them."""
    problems: dict[str | None, ApiError] = {}
    for details in error.errors():
        problem = _problem(details)
        problems.setdefault(problem.param, problem)
    first, *others = list(problems.values())[:MOST_PROBLEMS]
    message = "; ".join([first.message, *(other.message for other in others)])
    return ApiError(400, message, param=first.param, code=first.code)


def _problem(details: Mapping[str, Any]) -> ApiError:
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return api_error(cause)
    names = [str(part) for part in details["loc"][1:] if not is_shape(str(part))]  # after "body"
    # Up to where pydantic names the kinds of a union.
    names = list(itertools.takewhile(lambda name: name.isidentifier() or name.isdigit(), names))
    param = ".".join(names) or None
    if isinstance(details.get("input"), FieldError):  # a field that is refused
        return ApiError(400, str(details["input"]), param=param)
    if details["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param}", param=param, code="unknown_field")
    if details["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON", code="invalid_json")
    message = str(details["msg"])
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def _no_path(request: Request, error: HTTPException) -> ApiError:
    """For a path that there is not, or not with this method."""
    path = quote(get_route_path(request.scope)[:80])  # it may have ends of lines
    message = f"there is no {request.method} {path}"
    kind, code, headers = "not_found_error", "unknown_url", dict(error.headers or {})
    if "Allow" in headers:  # names the methods of one route, and a path may have several
        routes = request.app.routes
        scopes = {method: {**request.scope, "method": method} for method in METHODS}
        found = [
            method
            for method, scope in scopes.items()
            if any(route.matches(scope)[0] == Match.FULL for route in routes)
        ]
        headers["Allow"] = ", ".join(found)
    return ApiError(error.status_code, message, kind=kind, code=code, headers=headers)


def add_handlers(app: FastAPI, on_full: Callable[[], None]) -> None:
    """Answer every exception. ``on_full`` is called when the queue is full."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, QueueFull):
            on_full()
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            error = _no_path(request, error)
        return api_error(error).response(request.scope)

    for kind in (ApiError, RequestValidationError, HTTPException, ValueError, QueueFull):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(Exception, handle)
