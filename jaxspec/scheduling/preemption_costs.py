"""What it costs to preempt a sequence, and the host memory for those that are swapped."""

from collections.abc import Iterable

from jaxspec.config.cache import pages_for
from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.sequence import Sequence

REMEMBERED = 0.98  # share of earlier measurements in a mean, after each further one


class _Rate:
    """Seconds of one, on the mean of what was measured lately."""

    def __init__(self):
        self._amount, self._seconds = 0.0, 0.0

    def add(self, amount: int, seconds: float) -> None:
        self._amount = REMEMBERED * self._amount + amount
        self._seconds = REMEMBERED * self._seconds + max(0.0, seconds)

    @property
    def value(self) -> float | None:
        """None: nothing is known."""
        return self._seconds / self._amount if self._seconds else None


class PreemptionCosts:
    """What reading tokens again costs, and what moving pages to host memory and back costs.

    Both are learnt from what is measured. Swapping, which is exact in every dtype, counts as the
    cheaper one until both are known.
    """

    def __init__(self):
        self._token, self._part, self._round = _Rate(), _Rate(), _Rate()

    @property
    def recompute_token(self) -> float | None:
        """Seconds to read a token; None: not known yet."""
        return self._token.value

    @property
    def swap_part(self) -> float | None:
        """Seconds to move a part (see HostMemory) to host memory and back; None: not known yet."""
        return self._part.value

    def add_reading(self, tokens: int, seconds: float) -> None:
        """Note that reading so many tokens took so long."""
        self._token.add(tokens, seconds)

    def add_swap(self, parts: int, seconds: float) -> None:
        """Note that so many parts were moved to host memory and back."""
        self._part.add(parts, seconds)

    def add_call(self, tokens: int, rounds: int, seconds: float) -> None:
        """Note how long the calls of a plan took, which read tokens, ran rounds, or did both.

        What rounds cost is known from plans that read nothing.
        """
        if not tokens:
            if rounds:
                self._round.add(rounds, seconds)
        elif not rounds:
            self.add_reading(tokens, seconds)
        elif self._round.value is not None:
            self.add_reading(tokens, seconds - rounds * self._round.value)

    def swap_is_cheaper(self, tokens: int, parts: int) -> bool:
        """For a sequence of so many tokens, whose pages are so many parts."""
        token, part = self.recompute_token, self.swap_part
        return token is None or part is None or parts * part < tokens * token


class HostMemory:
    """Host memory for swapped sequences.

    Pages are moved in parts of ``limits.part_pages``; the last part of a sequence is padded.

    Attributes:
      parts: in use.
    """

    def __init__(self, limits: Limits):
        self.limits, self.parts = limits, 0

    def parts_for(self, num_pages: int) -> int:
        return -(-num_pages // self.limits.part_pages)

    def fits(self, num_pages: int) -> bool:
        """Whether a sequence of so many pages can be swapped now."""
        most = self.limits.host_parts
        return most is None or self.parts + self.parts_for(num_pages) <= most

    def is_better(self, num_tokens: int, num_pages: int, costs: PreemptionCosts) -> bool:
        """Whether a sequence is swapped rather than recomputed."""
        if self.limits.preemption == "recompute" or not self.fits(num_pages):
            assert not self.limits.swaps_only, "too many were admitted to swap them all"
            return False
        if self.limits.preemption == "swap":
            return True
        return costs.swap_is_cheaper(num_tokens, self.parts_for(num_pages))

    def take(self, sequence: Sequence, num_pages: int) -> None:
        """The first pages of a sequence are moved here."""
        sequence.swapped = num_pages
        self.parts += self.parts_for(num_pages)

    def give_back(self, sequence: Sequence) -> None:
        """The pages of a sequence are not needed here any more."""
        self.parts -= self.parts_for(sequence.swapped)
        sequence.swapped = 0

    def can_swap_all(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence], new: Sequence
    ) -> bool:
        """Whether none need be recomputed if a new one runs too, where that is forbidden."""
        if not self.limits.swaps_only or new.swapped:
            return True
        return self.never_lacks([*running, *(each for each in waiting if each.swapped), new])

    def never_lacks(self, sequences: Iterable[Sequence]) -> bool:
        """Whether these can be preempted by swapping alone, whatever they generate.

        They have the pages that they need to their ends, or else, since one of them runs in any
        case, all but the smallest fit here at their full lengths.
        """
        limits, size = self.limits, self.limits.page_size
        lengths = [sequence.limit for sequence in sequences]
        needed = sum(pages_for(length + limits.scratch_slots, size) for length in lengths)
        if limits.host_parts is None or needed <= limits.num_pages:
            return True
        parts = [self.parts_for(pages_for(length, size)) for length in lengths]
        return sum(parts) - min(parts) <= limits.host_parts
