"""The events of a message, and the message itself."""

import json
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion
from jaxspec.serving import results
from jaxspec.serving.answers import AnswerWriter, Event, new_id
from jaxspec.serving.chat import PreparedChat
from jaxspec.serving.errors import ApiError
from jaxspec.serving.parts import Part
from jaxspec.serving.protocol.messages import MessageObject, MessagesUsage

SIGNATURE = "jaxspec"  # of reasoning; it says nothing, and nothing is read of those sent back


class Block:
    """A block of a message while it grows: thinking, text, or the use of a tool."""

    def __init__(self, part: Part):
        self._call, self._reasons, self._text = part.call, part.reasoning, ""
        self._name, self._id = part.name, part.id or new_id("toolu")

    def takes(self, part: Part) -> bool:
        """Whether a part belongs to it."""
        return (part.call, part.reasoning) == (self._call, self._reasons)

    def opening(self) -> dict[str, Any]:
        """The block at its beginning."""
        if self._call is not None:
            return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}
        if self._reasons:
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def push(self, text: str) -> dict[str, Any]:
        """What is new, as a delta."""
        self._text += text
        if self._call is not None:
            return {"type": "input_json_delta", "partial_json": text}
        if self._reasons:
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "text_delta", "text": text}

    def closing(self) -> list[dict[str, Any]]:
        """The last deltas."""
        return [{"type": "signature_delta", "signature": SIGNATURE}] if self._reasons else []

    def whole(self) -> dict[str, Any]:
        """The block at its end."""
        block = self.opening()
        if self._call is not None:
            return {**block, "input": _object(self._text)}
        if self._reasons:
            return {**block, "thinking": self._text, "signature": SIGNATURE}
        return {**block, "text": self._text}


class MessageWriter(AnswerWriter):
    """Writes a message.

    Args:
      max_tokens: that were asked for, which may be more than fit.
      request_id: of the request, which errors tell.
    """

    def __init__(self, prepared: PreparedChat, max_tokens: int, request_id: str | None):
        self.prepared, self._max_tokens, self._request_id = prepared, max_tokens, request_id
        usage = MessagesUsage(input_tokens=len(prepared.prompts[0]))
        self._message = MessageObject(id=new_id("msg"), model=prepared.service.name, usage=usage)
        self._blocks: list[Block] = []  # the last one grows
        self._has_calls = False

    def made_by(self, weight_version: str | None) -> None:
        self._message.weight_version = weight_version

    def begin(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message.model_dump()}]

    def tokens(self, entries: Sequence[TokenLogprob]) -> None:
        """Messages have no log-probabilities."""

    def push(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if not self._blocks or not self._blocks[-1].takes(part):
                events += [*self._close(), *self._open(part)]
            if part.text:
                events.append(self._delta(self._blocks[-1].push(part.text)))
        return events

    def end(self, completion: Completion) -> list[Event]:
        self._message.stop_reason = self._stop_reason(completion)
        if self._message.stop_reason == "stop_sequence":
            self._message.stop_sequence = completion.stop_string
        usage, cached = results.usage([completion], 1), completion.cached_tokens
        self._message.usage = MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )
        events = [] if self._blocks else self._open(Part())  # an empty text
        events += self._close()
        whole = self._message.model_dump()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": whole["usage"]},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> list[Event]:
        return [error.anthropic_body(self._request_id)]

    def whole(self) -> MessageObject:
        return self._message

    def _stop_reason(self, completion: Completion) -> str:
        if results.finish_reason(completion) == "length":
            count = len(completion.prompt_token_ids) + len(completion.token_ids)
            is_full = count >= self.prepared.service.max_length
            has_all = len(completion.token_ids) >= self._max_tokens
            return "model_context_window_exceeded" if is_full and not has_all else "max_tokens"
        if self._has_calls:
            return "tool_use"
        return "end_turn" if completion.stop_string is None else "stop_sequence"

    def _open(self, part: Part) -> list[Event]:
        self._has_calls |= part.call is not None
        self._blocks.append(Block(part))
        block = self._blocks[-1].opening()
        place = len(self._blocks) - 1
        return [{"type": "content_block_start", "index": place, "content_block": block}]

    def _close(self) -> list[Event]:
        """The end of the block that grows, if there is one."""
        if not self._blocks:
            return []
        block = self._blocks[-1]
        self._message.content.append(block.whole())
        stop = {"type": "content_block_stop", "index": len(self._blocks) - 1}
        return [*map(self._delta, block.closing()), stop]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _object(text: str) -> dict[str, Any]:
    """The input of a tool; of a text that was cut within it, nothing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
