"""Lines of OpenAI's batch files, answered as the server answers their requests."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.batch.run import Answer
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.serving import chat, completions
from jaxspec.serving.errors import ApiError, api_error, validated
from jaxspec.serving.prepared import Told, answer
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.completions import CompletionRequest
from jaxspec.serving.results import new_id
from jaxspec.serving.service import Service

FIELDS = ("custom_id", "method", "url", "body")
KINDS: Mapping[str, Any] = MappingProxyType(
    {
        "/v1/completions": (CompletionRequest, completions.prepare),
        "/v1/chat/completions": (ChatRequest, chat.prepare),
    }
)


def batch_lines(
    llm: AsyncLLM | ReplicatedLLM, names: tuple[str, ...], chat_template: str | None, seed: int
) -> Answer:
    """What answers lines for a model by these names, in the shape of OpenAI's output files.

    ``seed``: requests without a seed get this one and their index.
    """
    service = Service(names, chat_template)
    service.start(llm)
    return partial(_answer, service, seed)


async def _answer(
    service: Service, seed: int, index: int, line: Mapping[str, Any]
) -> dict[str, Any]:
    """The result of a line. Where the server would refuse it, ``response`` has that status, and
    ``error`` says why, too."""
    error = None
    try:
        request, prepare = _read(line, {"seed": (seed + index) % 2**32})
        found = await answer(partial(prepare, service, request), Told())
        status, body = 200, found.model_dump(mode="json")
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


def _read(line: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[BaseModel, Any]:
    """The request of a line, and what prepares it. Raises FieldError for a line that is none of a
    batch, and RequestValidationError, as FastAPI does, for its body."""
    for name in line:
        if name not in FIELDS:
            raise FieldError(name, f"unknown field {name}: give {', '.join(FIELDS)}")
    if not isinstance(line.get("custom_id"), str):
        raise FieldError("custom_id", "custom_id must be text")
    if line.get("method") != "POST":
        raise FieldError("method", f"method must be POST, got {line.get('method')!r:.80}")
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in KINDS:
        raise FieldError("url", f"url must be one of {', '.join(KINDS)}, got {url!r:.80}")
    if not isinstance(body, dict):
        raise FieldError("body", "body must be an object")
    if body.get("stream"):
        raise FieldError("stream", "stream is not for batches: leave it out")
    kind, prepare = KINDS[url]
    return validated(kind, {**defaults, **body}), prepare
