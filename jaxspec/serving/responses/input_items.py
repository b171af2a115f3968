"""The items that a response was asked with, as they are told."""

from collections.abc import Sequence
from typing import Any

from jaxspec.serving.answers import new_id
from jaxspec.serving.protocol.responses import (
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    RefusalPart,
    TextPart,
)


def told_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """In their order, with ids."""
    return [_told(item) for item in items]


def _told(item: Item) -> dict[str, Any]:
    done = {"status": "completed"}
    match item:
        case MessageItem():
            parts = [_part(part, item.role == "assistant") for part in item.content]
            return {"id": new_id("msg"), **_plain(item, "content"), "content": parts, **done}
        case CallItem():
            return {"id": new_id("fc"), **_plain(item), **done}
        case CallOutputItem():
            parts = [_part(part, False) for part in item.output]
            return {"id": new_id("fco"), **_plain(item, "output"), "output": parts, **done}
    summary = [part.model_dump() for part in item.summary or []]
    content = [part.model_dump() for part in item.content or []]
    return {"id": new_id("rs"), "type": item.type, "summary": summary, "content": content}


def _plain(item: Item, *other: str) -> dict[str, Any]:
    """The fields of an item, but some."""
    return item.model_dump(exclude=set(other))


def _part(part: TextPart | RefusalPart, of_assistant: bool) -> dict[str, Any]:
    if isinstance(part, RefusalPart):
        return {"type": "refusal", "refusal": part.refusal}
    if of_assistant:
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.text}
