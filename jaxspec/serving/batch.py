"""Lines of OpenAI's batch files, answered as the server answers their requests."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.serving import chat, completions
from jaxspec.serving.errors import ApiError, api_error
from jaxspec.serving.prepared import answer
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.completions import CompletionRequest
from jaxspec.serving.results import new_id
from jaxspec.serving.service import Service

FIELDS = ("custom_id", "method", "url", "body")
PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclasses.dataclass(frozen=True)
class BatchLines:
    """Answers lines in the shape of OpenAI's output files.

    Attributes:
      seed: requests without a seed get this one and their index.
    """

    service: Service
    seed: int

    async def answer(self, index: int, line: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a line. Where the server would refuse it, ``response`` has that status, and
        ``error`` says why, too."""
        error = None
        try:
            body = (await self._respond(index, line)).model_dump(mode="json")
            status = 200
        except (ApiError, RequestValidationError, ValueError) as problem:
            refusal = api_error(problem)
            status, body = refusal.status, refusal.body()
            error = {"code": refusal.code or refusal.kind, "message": refusal.message}
        return {
            "id": new_id("batch_req"),
            "custom_id": line.get("custom_id"),
            "response": {"status_code": status, "request_id": new_id("req"), "body": body},
            "error": error,
        }

    async def _respond(self, index: int, line: Mapping[str, Any]) -> BaseModel:
        body = _checked_body(line)
        body = {"seed": (self.seed + index) % 2**32, **body}
        if line["url"] == PATHS[0]:
            request = _validated(CompletionRequest, body)
            return await answer(partial(completions.prepare, self.service, request), _free)
        request = _validated(ChatRequest, body)
        return await answer(partial(chat.prepare, self.service, request), _free)


def _free(_: int) -> None:
    """Tokens of a file of prompts count for no client."""


def _checked_body(line: Mapping[str, Any]) -> dict[str, Any]:
    """Raises FieldError for a line that is none of a batch."""
    for name in line:
        if name not in FIELDS:
            raise FieldError(name, f"unknown field {name}: give {', '.join(FIELDS)}")
    if not isinstance(line.get("custom_id"), str):
        raise FieldError("custom_id", "custom_id must be text")
    if line.get("method") != "POST":
        raise FieldError("method", f"method must be POST, got {line.get('method')!r:.80}")
    if line.get("url") not in PATHS:
        raise FieldError(
            "url", f"url must be one of {', '.join(PATHS)}, got {line.get('url')!r:.80}"
        )
    body = line.get("body")
    if not isinstance(body, dict):
        raise FieldError("body", "body must be an object")
    if body.get("stream"):
        raise FieldError("stream", "stream is not for batches: leave it out")
    return body


def _validated[T: BaseModel](kind: type[T], body: dict[str, Any]) -> T:
    """Raises RequestValidationError, as FastAPI does for a request."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = [{**details, "loc": ("body", *details["loc"])} for details in error.errors()]
        raise RequestValidationError(errors) from error


def batch_lines(
    llm: AsyncLLM | ReplicatedLLM, names: tuple[str, ...], chat_template: str | None, seed: int
) -> BatchLines:
    """What answers lines for a model by these names."""
    service = Service(names, chat_template)
    service.start(llm)
    return BatchLines(service, seed)
