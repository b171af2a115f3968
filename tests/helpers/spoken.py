"""What a model says in a test, while everything behind it is the server's: parsers, grammars, texts
of prompts, streams.

The model is tiny and says nothing of sense. Its answers end, and are cut, as they truly are; only
their text is a script's.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxspec.serving.answer_parser import AnswerForm, AnswerParser
from jaxspec.serving.chat import PreparedChat
from jaxspec.serving.parts import Part
from tests.helpers.listening import Listening

END = 256  # the token that ends a text, where tokens are bytes
PIECES = 8  # in which a text comes
ENDS: Any = {"temperature": 0.0, "logit_bias": {END: 100.0}}
GOES_ON: Any = {"temperature": 0.0, "logit_bias": {END: -100.0}}


class Cut(str):
    """A text that is cut by the limit of tokens."""


class SpokenParser(AnswerParser):
    """Parses the text of a script, piece by piece, instead of the model's."""

    def __init__(self, form: AnswerForm, text: str):
        super().__init__(form)
        size = len(text) // PIECES + 1
        self._left = [text[start : start + size] for start in range(0, len(text), size)]

    def push(self, piece: str, last: bool = False) -> list[Part]:
        now, self._left = (self._left, []) if last else (self._left[:1], self._left[1:])
        parts = [part for text in now for part in super(SpokenParser, self).push(text)]
        return [*parts, *super().push("", last=True)] if last else parts


class Script:
    """The texts of the next answers, one for each request.

    Attributes:
      prompts: of the requests so far.
      left: texts of those to come.
    """

    def __init__(self, listener: Listening, texts: Sequence[str]):
        self.prompts: list[str] = []
        self.left = list(texts)
        self._listener, self._given = listener, dict[str, str]()
        self._await_next()

    def _await_next(self) -> None:
        """The next answer ends by itself, or does not."""
        is_cut = bool(self.left) and isinstance(self.left[0], Cut)
        self._listener.samples(**(GOES_ON if is_cut else ENDS))

    def parser(self, prepared: PreparedChat) -> AnswerParser:
        if prepared.id not in self._given:
            self._given[prepared.id] = self.left.pop(0)
            self.prompts.append(prepared.service.llm.llm.detokenize(prepared.prompts[0]))
            self._await_next()
        return SpokenParser(prepared.form, self._given[prepared.id])


def spoken(monkeypatch: pytest.MonkeyPatch, listener: Listening, *texts: str) -> Script:
    """Let the next answers of chats be these."""
    script = Script(listener, texts)
    monkeypatch.setattr(PreparedChat, "parser", lambda prepared: script.parser(prepared))
    return script


def called(name: str, arguments: str) -> str:
    """A call as Hermes and Qwen3 write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"
