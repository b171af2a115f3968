"""The text of an answer, split into parts while it grows."""

import dataclasses

from jaxspec.serving.parts import Part
from jaxspec.serving.reasoning import ReasoningFormat, ReasoningParser
from jaxspec.serving.tool_formats.parser import ToolParser
from jaxspec.serving.tool_formats.syntax import CallSyntax


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """What an answer may consist of.

    Attributes:
      tools: how tools are called; None: they may not be.
      reasoning: what stands around reasoning; None: it is not told from the text.
      inside: whether the answer begins within reasoning.
      structured: whether the text after the reasoning matches a description, or calls tools and
        does nothing else.
      trims: whether line breaks that begin the text are no part of the answer: the grammar allows
        them, as chat templates leave a blank line after reasoning.
    """

    tools: CallSyntax | None = None
    reasoning: ReasoningFormat | None = None
    inside: bool = False
    structured: bool = False
    trims: bool = False


class AnswerParser:
    """Splits the growing text of an answer into parts."""

    def __init__(self, form: AnswerForm):
        self._tools = None if form.tools is None else ToolParser(form.tools)
        self._reasoning: ReasoningParser | None = None
        self._trims = form.trims  # until there is more than line breaks
        if form.reasoning is not None:
            self._reasoning = ReasoningParser(
                form.reasoning,
                inside=form.inside,
                call="" if form.tools is None or form.structured else form.tools.form.trigger,
                trims=form.trims,
                exact=form.structured,
            )

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return 0 if self._tools is None else self._tools.calls

    @property
    def inside(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def push(self, piece: str, last: bool = False) -> list[Part]:
        """What is new. With ``last`` nothing is held back."""
        if self._reasoning is None:
            return self._text(piece, last)
        parts: list[Part] = []
        for part in self._reasoning.push(piece, last):
            parts += [part] if part.reasoning else self._text(part.text, False)
        return [*parts, *self._text("", True)] if last else parts

    def _text(self, piece: str, last: bool) -> list[Part]:
        if self._trims:
            piece = piece.lstrip("\n")
            self._trims = not piece
        if self._tools is not None:
            return self._tools.push(piece, last)
        return [Part(piece)] if piece else []
