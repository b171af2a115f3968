"""Calls of tools: how a model writes them, and calls parsed out of a text.

The grammar (tool_grammar.py) writes every call in one way, so that the parser meets no other.
"""

import dataclasses
import json
from types import MappingProxyType

from jaxspec.llm.tokenizer.detokenizer import overlap
from jaxspec.serving.parts import Part
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest, NamedTool, Tool


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call: ``begin {"name": NAME, ARGUMENTS: {...}} end``.

    Attributes:
      begin: what begins a call in the midst of text; empty: a call is the whole text.
    """

    begin: str
    end: str
    arguments: str

    @property
    def opening(self) -> str:
        """What comes before the name."""
        return f'{self.begin}{{"name": "'

    @property
    def middle(self) -> str:
        """What comes between the name and the arguments."""
        return f'", "{self.arguments}": '

    @property
    def closing(self) -> str:
        return f"}}{self.end}"


FORMATS = MappingProxyType(
    {
        "hermes": ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments"),  # Hermes, Qwen
        "json": ToolFormat("", "", "parameters"),  # Llama 3
    }
)


def tool_format(name: str | None, template: str) -> ToolFormat:
    """The format of this name; None: the one that a chat template speaks of."""
    if name is None:
        name = "json" if '"parameters"' in template and "<tool_call>" not in template else "hermes"
    return FORMATS[name]


def offered_tools(request: ChatRequest) -> list[Tool]:
    """The tools that the text may call. Raises FieldError for fields that do not go together."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise FieldError("tools", "two tools have the same name")
    if choice in (None, "auto", "none"):
        return [] if choice == "none" else tools
    if not tools:
        raise FieldError("tool_choice", "tool_choice needs tools")
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise FieldError("tool_choice", f"there is no tool {choice.function.name!r}")
    return tools


class ToolParser:
    """Splits a growing text into free text and calls of tools.

    No text is lost. A call that ends before its arguments begin is free text.
    """

    def __init__(self, form: ToolFormat):
        self._form, self._calls = form, 0
        self._state = "text" if form.begin else "start"
        self._pending = ""  # of a state that waits for more
        self._arguments = ""  # of the last call, so far

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return self._calls

    def push(self, piece: str, last: bool = False) -> list[Part]:
        """What is new. With ``last`` nothing is held back."""
        self._pending += piece
        parts: list[Part] = []
        while (step := self._step(last)) is not None:
            parts += step
        return [part for part in parts if part.text or part.name is not None]

    def _step(self, last: bool) -> list[Part] | None:
        """One part, and what is pending gets shorter; None: nothing to do."""
        form, pending = self._form, self._pending
        if not pending and not (last and self._state == "name"):
            return None
        match self._state:
            case "start":  # a call is the whole text
                if pending.startswith(form.opening):
                    return self._enter("name", len(form.opening))
                if form.opening.startswith(pending) and not last:
                    return None
                return self._enter("free", 0)
            case "after":  # a call: the line that it stands on ends
                return self._enter("text", int(pending.startswith("\n")))
            case "free":
                return self._text(len(pending))
            case "text":
                place = pending.find(form.opening)
                if place >= 0:
                    self._enter("name", place + len(form.opening))
                    return [Part(pending[:place])]
                return self._text(len(pending) - (0 if last else overlap(pending, form.opening)))
            case "name":
                place = pending.find(form.middle)
                if place < 0:
                    return self._not_a_call() if last else None
                self._calls += 1
                self._arguments = ""
                self._enter("arguments", place + len(form.middle))
                return [Part(call=self._calls - 1, name=pending[:place])]
            case _:
                return self._more_arguments(last)

    def _not_a_call(self) -> list[Part]:
        """The text ends before the arguments begin: what was written is shown as it is."""
        text = f"{self._form.opening}{self._pending}"
        self._enter("free", len(self._pending))
        return [Part(text)]

    def _more_arguments(self, last: bool) -> list[Part] | None:
        form, pending = self._form, self._pending
        call = self._calls - 1
        place = pending.find(form.closing) if form.begin else -1
        if place >= 0:
            self._enter("after", place + len(form.closing))
            return [Part(pending[:place], call)]
        if last:
            text, self._pending = self._without_closing(), ""
            return [Part(text, call)]
        # Without an end of its own a call goes up to the end of the text, and may be all braces.
        braces = len(pending) - len(pending.rstrip("}"))
        characters = len(pending) - (overlap(pending, form.closing) if form.begin else braces)
        self._arguments += pending[:characters]
        return self._cut(characters, call)

    def _without_closing(self) -> str:
        """What is pending of the arguments at the end of the text, without a part of the closing:
        the arguments are complete before that."""
        whole, known = self._arguments + self._pending, len(self._arguments)
        try:
            _, end = json.JSONDecoder().raw_decode(whole)
        except (ValueError, RecursionError):  # the text ends within them
            return self._pending
        return whole[known:end] if self._form.closing.startswith(whole[end:]) else whole[known:]

    def _enter(self, state: str, characters: int) -> list[Part]:
        self._state, self._pending = state, self._pending[characters:]
        return []

    def _text(self, characters: int) -> list[Part] | None:
        return self._cut(characters, None)

    def _cut(self, characters: int, call: int | None) -> list[Part] | None:
        if not characters:
            return None
        text, self._pending = self._pending[:characters], self._pending[characters:]
        return [Part(text, call)]
