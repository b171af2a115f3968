"""From requests for a response to chats."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from jaxspec.serving import chat, results
from jaxspec.serving.answers import new_id, renamed_errors
from jaxspec.serving.errors import ascii_json, validated
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.responses import (
    LOGPROBS,
    AllowedTools,
    FunctionTool,
    Items,
    JsonSchemaFormat,
    NamedTool,
    ResponseObject,
    ResponsesRequest,
    ToolChoice,
)
from jaxspec.serving.protocol.sampling import SamplingControls
from jaxspec.serving.responses.input import messages_of
from jaxspec.serving.responses.input_items import told_items
from jaxspec.serving.responses.store import ResponseStore
from jaxspec.serving.responses.writer import ResponseWriter
from jaxspec.serving.service import Service

# Fields of chats, and what they are here.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        r"messages\b.*": "input",
        r"prompt": "input",
        r"max_tokens|max_completion_tokens": "max_output_tokens",
        r"response_format\b.*": "text.format",
        r"reasoning_effort": "reasoning.effort",
        r"(tools\.\d+)\.function\.(\w+)": r"\1.\2",
    }
)
_items = TypeAdapter(Items)


async def prepare(
    service: Service, store: ResponseStore, client: str, request: ResponsesRequest
) -> ResponseWriter:
    """What writes the response. Raises ApiError for a request that cannot be served.

    Args:
      client: whose responses may be gone on with, and who may ask for this one.
    """
    service.check(request.model)
    messages = messages_of(request.input)
    if request.previous_response_id is not None:
        messages = [*store.messages(client, request.previous_response_id), *messages]
    with renamed_errors(NAMES):
        prepared = await chat.prepare(service, chat_request(request, messages))
    response = _beginning(request, prepared)
    response.store &= store.keeps

    def keep(whole: ResponseObject) -> None:
        if whole.store:
            said = messages_of(_items.validate_python(whole.output))
            response, items = ascii_json(whole.model_dump()), told_items(request.input)
            store.add(client, whole.id, response, items, [*messages, *said])

    return ResponseWriter(prepared, response, keep)


def chat_request(request: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """The chat with these messages, of which the instructions are the first."""
    fields = {name: getattr(request, name) for name in SamplingControls.model_fields}
    instructions = request.instructions
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    effort = None if request.reasoning is None else request.reasoning.effort
    logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not logprobs:
        raise FieldError("top_logprobs", f"top_logprobs needs include to have {LOGPROBS}")
    fields |= {
        "model": request.model,
        "messages": [*first, *messages],
        "max_completion_tokens": request.max_output_tokens,
        "tools": None if request.tools is None else [_tool(tool) for tool in request.tools],
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "logprobs": logprobs,
        "top_logprobs": request.top_logprobs if logprobs else None,
        "response_format": _response_format(request),
        "reasoning_effort": effort,
        "thinking_token_budget": request.thinking_token_budget,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return validated(ChatRequest, fields)


def _tool(tool: FunctionTool) -> Any:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _choice(choice: ToolChoice | None) -> Any:
    match choice:
        case NamedTool():
            return {"type": "function", "function": {"name": choice.name}}
        case AllowedTools():
            tools = [_choice(tool) for tool in choice.tools]
            allowed = {"mode": choice.mode, "tools": tools}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = None if request.text is None else request.text.format
    match form:
        case None:
            return None
        case JsonSchemaFormat():
            schema = {"name": form.name, "schema": form.json_schema, "strict": form.strict}
            return {"type": "json_schema", "json_schema": schema}
    return {"type": form.type}


def _beginning(request: ResponsesRequest, prepared: chat.PreparedChat) -> ResponseObject:
    [sampling] = prepared.sampling
    reasoning = request.reasoning
    form = None if request.text is None else request.text.format
    return ResponseObject(
        id=new_id("resp"),
        created_at=results.now(),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=prepared.service.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
        },
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=sampling.temperature,
        text={"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
        tool_choice=_told(request.tool_choice),
        tools=[tool.model_dump() for tool in request.tools or []],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        user=request.user,
    )


def _told(choice: ToolChoice | None) -> str | dict[str, Any]:
    match choice:
        case None:
            return "auto"
        case AllowedTools():
            tools = [tool.model_dump() for tool in choice.tools]
            return {"type": choice.type, "mode": choice.mode, "tools": tools}
        case NamedTool():
            return choice.model_dump()
    return choice
