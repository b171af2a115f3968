"""From requests for a message to chats."""

import asyncio
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.serving import chat
from jaxspec.serving.answers import renamed_errors
from jaxspec.serving.anthropic.conversation import has_late_system, messages_of, system_in_front
from jaxspec.serving.anthropic.writer import MessageWriter
from jaxspec.serving.effort_trial import THINKING
from jaxspec.serving.errors import ApiError, validated
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.messages import CountRequest, CustomTool, MessagesRequest, ToolChoice
from jaxspec.serving.service import Service

# Fields of chats, and what they are here.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        r"messages\b.*|prompt": "messages",
        r"response_format\b.*": "output_config.format",
        r"reasoning_effort": "output_config.effort",
        r"stop": "stop_sequences",
        r"thinking_token_budget": "thinking.budget_tokens",
        r"(tools\.\d+)\.function\.parameters": r"\1.input_schema",
        r"(tools\.\d+)\.function\.(\w+)": r"\1.\2",
    }
)
CHOICES = MappingProxyType({"auto": "auto", "any": "required", "none": "none"})
# What a server says that keeps no threads: clients then send the whole conversation.
NO_THREADS: Mapping[str, Any] = MappingProxyType(
    {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
)
PROBE = "fd9c51"  # a text that is found again in a prompt


async def prepare(
    service: Service, request: MessagesRequest, request_id: str | None
) -> MessageWriter:
    """What writes the message. Raises ApiError for a request that cannot be served.

    As with Anthropic, ``max_tokens`` may be more than fit.
    """
    service.check(request.model)
    budget = None if request.thinking is None else request.thinking.budget_tokens
    if budget is not None and budget >= request.max_tokens:
        name = "thinking.budget_tokens"
        raise FieldError(name, f"{name} must be less than max_tokens, {request.max_tokens}")
    fields = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
        "cache_salt": request.cache_salt,
    }
    with renamed_errors(NAMES):
        prepared = await chat.prepare(service, await chat_request(service, request, fields))
    [sampling] = prepared.sampling
    most = min(request.max_tokens, sampling.max_tokens)
    sampling = dataclasses.replace(sampling, max_tokens=most)
    prepared = dataclasses.replace(prepared, sampling=[sampling])
    return MessageWriter(prepared, request.max_tokens, request_id)


async def count_tokens(service: Service, request: CountRequest) -> int:
    """The prompt's number of tokens. Raises ApiError for a request that cannot be."""
    service.check(request.model)
    with renamed_errors(NAMES):
        return len(await chat.prompt_ids(service, await chat_request(service, request, {})))


async def chat_request(
    service: Service, request: CountRequest, fields: Mapping[str, Any]
) -> ChatRequest:
    """The chat, with further ``fields``. A conversation that ends with the assistant's text is gone
    on with from there."""
    if request.thread is not None:
        raise ApiError(400, "threads are not supported", param="thread", details=NO_THREADS)
    messages = messages_of(request.system, request.messages)
    if not messages:
        raise FieldError("messages", "messages must have a turn of the user")
    if has_late_system(messages) and not await takes_late_system(service):
        messages = system_in_front(messages)
    last, choice, output = messages[-1], request.tool_choice, request.output_config
    goes_on = last["role"] == "assistant" and "tool_calls" not in last
    found = {
        **fields,
        "model": request.model,
        "messages": messages,
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on,
        "tools": [_tool(tool) for tool in request.tools or []] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "response_format": _response_format(request),
        "reasoning_effort": None if output is None else output.effort,
    }
    return validated(ChatRequest, {**found, **_thinking(request)})


async def takes_late_system(service: Service) -> bool:
    """Whether the chat template shows the system's messages in the midst of a conversation."""
    roles = ("system", "user", "system", "user")
    messages = [{"role": role, "content": "a"} for role in roles]
    messages[2]["content"] = PROBE
    llm, template = service.llm.llm, chat.chat_template(service)
    variables = {"add_generation_prompt": True, "continue_final_message": False}
    try:
        [prompt] = await asyncio.to_thread(llm.chat_prompts, messages, template, variables)
    except ValueError:
        return False
    return PROBE in llm.detokenize(prompt)


def _tool(tool: CustomTool) -> Any:
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise FieldError("tool_choice.name", "tool_choice.name must name a tool")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(request: CountRequest) -> dict[str, Any] | None:
    of_config = None if request.output_config is None else request.output_config.format
    form = of_config or request.output_format
    if form is None:
        return None
    output = {"name": "output", "schema": form.json_schema, "strict": True}  # as Anthropic has it
    return {"type": "json_schema", "json_schema": output}


def _thinking(request: CountRequest) -> dict[str, Any]:
    """Variables of the template, fields that turn reasoning on or off, and bound it."""
    thinking = request.thinking
    given = request.chat_template_kwargs or {}
    if thinking is None or thinking.type == "adaptive":
        return {"chat_template_kwargs": given} if given else {}
    is_on = thinking.type == "enabled"
    found: dict[str, Any] = {"chat_template_kwargs": {**dict.fromkeys(THINKING, is_on), **given}}
    if is_on:
        found["thinking_token_budget"] = thinking.budget_tokens
    return found
