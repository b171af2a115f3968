"""Where a structured request stands: before, within or after its reasoning."""

import dataclasses
import enum
from collections.abc import Collection, Sequence

from jaxspec.config.structured_output import Reasoning


class Phase(enum.Enum):
    BEFORE = enum.auto()
    WITHIN = enum.auto()
    AFTER = enum.auto()


@dataclasses.dataclass
class Phases:
    """The phases of a request whose reasoning is free: its rows run as others do meanwhile.

    A row pauses where a phase may end: it stops at a token of ``pauses``, as at a stop token. Then
    ``pass_pause`` says what comes next, and the row is told to go on. Markers count as tokens: one
    that is spelled in others is reasoning.

    Attributes:
      first, last: the first token of the reasoning, and the one that ended it, by their numbers in
        the text; None: they have not come.
    """

    reasoning: Reasoning
    first: int | None = None
    last: int | None = None
    phase: Phase = Phase.BEFORE

    def __post_init__(self):
        if self.reasoning.inside:
            self.phase, self.first = Phase.WITHIN, 0

    @property
    def masked(self) -> bool:
        """Whether the grammar restricts the next token."""
        return self.phase is not Phase.WITHIN

    @property
    def pauses(self) -> tuple[int, ...]:
        """The tokens at which the row pauses."""
        match self.phase:
            case Phase.BEFORE:
                return tuple({begin[-1] for begin in self.reasoning.begin_ids})
            case Phase.WITHIN:
                return self.reasoning.end_ids
        return ()

    def pass_pause(self, text: Sequence[int]) -> None:
        """Enter the phase that follows the pause at the last token of a text."""
        if self.phase is Phase.BEFORE and tuple(text) in self.reasoning.begin_ids:
            self.phase, self.first = Phase.WITHIN, len(text)
        else:  # the token of a beginning that stands elsewhere begins nothing
            self.last = len(text) - 1 if self.phase is Phase.WITHIN else None
            self.phase = Phase.AFTER

    def is_free(self, place: int) -> bool:
        """Whether the grammar does not see the token of this number: it is reasoning."""
        if self.first is None or place < self.first:
            return False
        return self.last is None or place < self.last


def new_phases(
    reasoning: Reasoning | None, stops: Collection[int], most_stops: int
) -> Phases | None:
    """The phases of a new request; None: it has none, the grammar holds the reasoning.

    Args:
      stops: the tokens that end the text. No marker may be among them.
      most_stops: most tokens at which a row may stop.
    """
    if reasoning is None or not reasoning.end_ids:
        return None
    phases = Phases(reasoning)
    tokens = {*reasoning.end_ids, *phases.pauses}
    fits = len(stops) + len(tokens) <= most_stops
    return phases if fits and not tokens & {*stops} else None
