"""From items of a response to messages of a chat."""

from collections.abc import Sequence
from typing import Any

from jaxspec.serving.protocol.responses import (
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    TextPart,
)


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages. Reasoning, text and calls in a row are one turn of the assistant."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn = _turn(messages)
                turn["content"] += _text(item.content)
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content)})
            case ReasoningItem():
                turn = _turn(messages)
                texts = _text(item.content or item.summary or [])
                turn["reasoning_content"] = turn.get("reasoning_content", "") + texts
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages).setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                content = _text(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return messages


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that the next item belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(parts: Sequence[TextPart | RefusalPart]) -> str:
    return "\n".join(part.text for part in parts)
