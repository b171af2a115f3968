"""Items of a response while they grow: text, reasoning, and calls of tools.

Each gives the events that tell of it: their types and fields.
"""

from collections.abc import Sequence
from typing import Any

from jaxspec.serving.answers import new_id
from jaxspec.serving.parts import Part
from jaxspec.serving.responses.logprobs import without_bytes

type Told = tuple[str, dict[str, Any]]


class TextItem:
    """A message, or reasoning."""

    def __init__(self, part: Part):
        self._reasons, self._text = part.reasoning, ""
        self._kind = "reasoning_text" if part.reasoning else "output_text"
        self.id = new_id("rs" if part.reasoning else "msg")
        self._where = {"item_id": self.id, "content_index": 0}
        self._logprobs: list[dict[str, Any]] = []

    def takes(self, part: Part) -> bool:
        """Whether a part belongs to it."""
        return part.call is None and part.reasoning == self._reasons

    def opening(self) -> list[Told]:
        return [
            ("response.output_item.added", {"item": self._item([], "in_progress")}),
            ("response.content_part.added", {**self._where, "part": self._content("")}),
        ]

    def push(self, part: Part, logprobs: Sequence[dict[str, Any]] = ()) -> list[Told]:
        """``logprobs``: of the part's tokens, if they are asked for."""
        self._text += part.text
        self._logprobs += logprobs
        delta = {"delta": part.text, **self._more(logprobs)}
        return [(f"response.{self._kind}.delta", {**self._where, **delta})]

    def closing(self, status: str) -> list[Told]:
        text = {"text": self._text, **self._more(self._logprobs)}
        return [
            (f"response.{self._kind}.done", {**self._where, **text}),
            ("response.content_part.done", {**self._where, "part": self._content(self._text)}),
            ("response.output_item.done", {"item": self.item(status)}),
        ]

    def item(self, status: str) -> dict[str, Any]:
        """The item as it stands in the output."""
        return self._item([self._content(self._text)], status)

    def _more(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What events have beside the text."""
        return {} if self._reasons else {"logprobs": without_bytes(logprobs)}

    def _content(self, text: str) -> dict[str, Any]:
        content = {"type": self._kind, "text": text}
        if self._reasons:
            return content
        return {**content, "annotations": [], "logprobs": self._logprobs if text else []}

    def _item(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        if self._reasons:
            kind: dict[str, Any] = {"type": "reasoning", "summary": []}
        else:
            kind = {"type": "message", "role": "assistant"}
        return {"id": self.id, **kind, "content": content, "status": status}


class CallItem:
    """A call of a tool."""

    def __init__(self, part: Part):
        self._call, self._name, self._arguments = part.call, part.name, ""
        self.id, self._call_id = new_id("fc"), part.id or new_id("call")

    def takes(self, part: Part) -> bool:
        """Whether a part belongs to it."""
        return part.call == self._call

    def opening(self) -> list[Told]:
        return [("response.output_item.added", {"item": self.item("in_progress")})]

    def push(self, part: Part, logprobs: Sequence[dict[str, Any]] = ()) -> list[Told]:
        """``logprobs`` are of texts alone."""
        self._arguments += part.text
        told = {"item_id": self.id, "delta": part.text}
        return [("response.function_call_arguments.delta", told)]

    def closing(self, status: str) -> list[Told]:
        told = {"item_id": self.id, "name": self._name, "arguments": self._arguments}
        return [
            ("response.function_call_arguments.done", told),
            ("response.output_item.done", {"item": self.item(status)}),
        ]

    def item(self, status: str) -> dict[str, Any]:
        """The item as it stands in the output."""
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
            "status": status,
        }
