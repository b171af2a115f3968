"""The events of a response, and the response itself."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion
from jaxspec.serving import results
from jaxspec.serving.answers import AnswerWriter, Event
from jaxspec.serving.chat import PreparedChat
from jaxspec.serving.errors import ApiError
from jaxspec.serving.parts import Part
from jaxspec.serving.protocol.responses import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
)
from jaxspec.serving.protocol.sampling import Usage
from jaxspec.serving.responses.items import CallItem, TextItem, Told
from jaxspec.serving.responses.logprobs import TextTokens, content_logprobs


class ResponseWriter(AnswerWriter):
    """Writes a response.

    Args:
      response: as it is at the beginning.
      keep: called with it at its end, before the last event.
    """

    def __init__(
        self,
        prepared: PreparedChat,
        response: ResponseObject,
        keep: Callable[[ResponseObject], None],
    ):
        self.prepared, self._response, self._keep = prepared, response, keep
        self._items: list[TextItem | CallItem] = []  # the last one grows
        self._number = itertools.count()
        self._tokens = TextTokens(prepared) if prepared.request.logprobs else None

    def made_by(self, weight_version: str | None) -> None:
        self._response.weight_version = weight_version

    def begin(self) -> list[Event]:
        return [self._of_response("created"), self._of_response("in_progress")]

    def tokens(self, entries: Sequence[TokenLogprob]) -> None:
        if self._tokens is not None:
            self._tokens.add(entries)

    def push(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if not self._items or not self._items[-1].takes(part):
                events += [*self._close("completed"), *self._open(part)]
            if part.text:
                events += self._of_item(self._items[-1].push(part, self._logprobs(part)))
        return events

    def end(self, completion: Completion) -> list[Event]:
        is_cut = results.finish_reason(completion) == "length"
        status = "incomplete" if is_cut else "completed"
        events = [] if self._items else self._open(Part())  # an empty text
        events += self._close(status)
        response = self._response
        response.status = status
        if is_cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            response.completed_at = results.now()
        response.usage = _usage(self.prepared.usage([completion]))
        self._keep(response)
        return [*events, self._of_response(status)]

    def failed(self, error: ApiError) -> list[Event]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._response.error = {"code": code, "message": error.message}
        self._response.status = "failed"
        if self._items and len(self._response.output) < len(self._items):
            self._response.output.append(self._items[-1].item("incomplete"))
        return [self._of_response("failed")]

    def whole(self) -> ResponseObject:
        return self._response

    def _logprobs(self, part: Part) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens of a text, if they are asked for."""
        if self._tokens is None or part.call is not None:
            return []
        tokens = self._tokens.take(part.text)
        return [] if part.reasoning else content_logprobs(self.prepared, tokens)

    def _open(self, part: Part) -> list[Event]:
        self._items.append(TextItem(part) if part.call is None else CallItem(part))
        return self._of_item(self._items[-1].opening())

    def _close(self, status: str) -> list[Event]:
        """The end of the item that grows, if there is one."""
        if not self._items:
            return []
        self._response.output.append(self._items[-1].item(status))
        return self._of_item(self._items[-1].closing(status))

    def _of_item(self, told: Iterable[Told]) -> list[Event]:
        """Events of the last item."""
        place = {"output_index": len(self._items) - 1}
        return [self._event(kind, {**place, **fields}) for kind, fields in told]

    def _of_response(self, status: str) -> Event:
        return self._event(f"response.{status}", {"response": self._response.model_dump()})

    def _event(self, kind: str, fields: dict[str, Any]) -> Event:
        return {"type": kind, "sequence_number": next(self._number), **fields}


def _usage(usage: Usage) -> ResponseUsage:
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    reasoning = 0 if details is None else details.reasoning_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
        total_tokens=usage.total_tokens,
    )
