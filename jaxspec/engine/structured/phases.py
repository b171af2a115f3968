"""Where a structured request stands: before, within or after its free text."""

import dataclasses
import enum
from collections.abc import Collection, Sequence

from jaxspec.config.structured_output import StructuredOutput


class Phase(enum.Enum):
    BEFORE = enum.auto()
    WITHIN = enum.auto()
    AFTER = enum.auto()


@dataclasses.dataclass
class Phases:
    """The phases of a request with free text, reasoning or what comes before a call: its rows run
    as others do meanwhile.

    A row pauses where a phase may end: it stops at a token of ``pauses``, as at a stop token. Then
    ``pass_pause`` says what comes next, and the row is told to go on. Markers count as tokens: one
    that is spelled in others is free text.

    Attributes:
      begins: the tokens that a text begins with which is free from there, in all ways; none: it is
        free from its beginning.
      end: the token that ends the free text, and is the first that the grammar sees again.
      first, last: the first free token, and the one that ended them, by their numbers in the text;
        None: they have not come.
    """

    begins: tuple[tuple[int, ...], ...]
    end: int
    first: int | None = None
    last: int | None = None
    phase: Phase = Phase.BEFORE

    def __post_init__(self):
        if not self.begins:
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
                return tuple({begin[-1] for begin in self.begins})
            case Phase.WITHIN:
                return (self.end,)
        return ()

    def pass_pause(self, text: Sequence[int]) -> None:
        """Enter the phase that follows the pause at the last token of a text."""
        if self.phase is Phase.BEFORE and tuple(text) in self.begins:
            self.phase, self.first = Phase.WITHIN, len(text)
        else:  # the token of a beginning that stands elsewhere begins nothing
            self.last = len(text) - 1 if self.phase is Phase.WITHIN else None
            self.phase = Phase.AFTER

    def is_free(self, place: int) -> bool:
        """Whether the grammar does not see the token of this number."""
        if self.first is None or place < self.first:
            return False
        return self.last is None or place < self.last


def new_phases(spec: StructuredOutput, stops: Collection[int], most_stops: int) -> Phases | None:
    """The phases of a new request; None: it has none, the grammar holds all of its text.

    Args:
      stops: the tokens that end the text. No marker may be among them.
      most_stops: most tokens at which a row may stop.
    """
    reasoning = spec.reasoning
    if spec.trigger is not None:
        phases = Phases((), spec.trigger)
    elif reasoning is None or reasoning.end_id is None:
        return None
    elif reasoning.inside or reasoning.begin_ids:
        phases = Phases(() if reasoning.inside else reasoning.begin_ids, reasoning.end_id)
    else:
        return None
    tokens = {phases.end, *phases.pauses}
    fits = len(stops) + len(tokens) <= most_stops
    return phases if fits and not tokens & {*stops} else None
