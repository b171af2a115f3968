"""The text of an answer, split into parts while it grows."""

from jaxspec.serving.parts import Part
from jaxspec.serving.tools import ToolFormat, ToolParser


class AnswerParser:
    """Splits the growing text of an answer into parts.

    Args:
      form: how tools are called; None: they may not be.
      trims: whether line breaks that begin the text are no part of the answer: the grammar allows
        them, as chat templates leave a blank line after reasoning.
    """

    def __init__(self, form: ToolFormat | None, trims: bool):
        self._tools = None if form is None else ToolParser(form)
        self._trims = trims  # until there is more than line breaks

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return 0 if self._tools is None else self._tools.calls

    def push(self, piece: str, last: bool = False) -> list[Part]:
        """What is new. With ``last`` nothing is held back."""
        if self._trims:
            piece = piece.lstrip("\n")
            self._trims = not piece
        if self._tools is not None:
            return self._tools.push(piece, last)
        return [Part(piece)] if piece else []
