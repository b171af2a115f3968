"""From Anthropic's messages to those of a chat."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from jaxspec.serving.protocol.messages import (
    AnyMessage,
    AssistantMessage,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)

# A block of the system prompt that differs from request to request, as it holds a hash: with it no
# request would find its beginning in the prefix cache.
BILLING = "x-anthropic-billing-header"


def messages_of(
    system: Sequence[TextBlock] | None, messages: Sequence[AnyMessage]
) -> list[dict[str, Any]]:
    """The messages of a chat. Those of the system that stand in front are one."""
    found = [{"role": "system", "content": _system(system)}] if system else []
    for message in messages:
        match message:
            case UserMessage():
                found += _of_user(message)
            case AssistantMessage():
                found.append(_of_assistant(message))
            case SystemMessage():
                found.append({"role": "system", "content": _system(message.content)})
    return _with_one_in_front(found)


def system_in_front(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, those of the system first, for templates that take it only there."""
    later = [message for message in messages if message["role"] != "system"]
    return _with_one_in_front([m for m in messages if m["role"] == "system"] + later)


def has_late_system(messages: Sequence[dict[str, Any]]) -> bool:
    return any(message["role"] == "system" for message in messages[1:])


def _with_one_in_front(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    front = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    texts = [message["content"] for message in front if message["content"]]
    first = [{"role": "system", "content": "\n".join(texts)}] if texts else []
    return [*first, *messages[len(front) :]]


def _system(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks if not block.text.startswith(BILLING))


def _of_user(message: UserMessage) -> list[dict[str, Any]]:
    """Results of tools come first: they answer the assistant's turn."""
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    found = [_of_result(block) for block in message.content if isinstance(block, ToolResultBlock)]
    if texts or not found:
        found.append({"role": "user", "content": "\n".join(texts)})
    return found


def _of_result(block: ToolResultBlock) -> dict[str, Any]:
    text = "\n".join(part.text for part in block.content or [])
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _of_assistant(message: AssistantMessage) -> dict[str, Any]:
    blocks = message.content
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    found: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        found["reasoning_content"] = thinking
    if calls:
        found["tool_calls"] = calls
    return found
