"""How many rounds a call runs."""

from collections.abc import Collection

from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.sequence import Sequence

MASKED_ROUNDS = 8  # of a call beside masked rows, which run one
REMEMBERED = 0.98  # share of earlier tokens and rounds in a mean, after each further row


class CallRounds:
    """Few rounds while a row reads or a request waits, else more from call to call.

    Few are those that take the device as long as the host needs for the call.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self._next = 1  # while nothing waits
        self._tokens, self._rounds = 1.0, 1.0  # lately, for the mean tokens of a round

    def observe(self, tokens: int, rounds: int) -> None:
        """A row got so many tokens in a call of so many rounds."""
        self._tokens = REMEMBERED * self._tokens + tokens
        self._rounds = REMEMBERED * self._rounds + rounds

    def choose(self, rows: Collection[Sequence], most: int, *, reads: bool, waits: bool) -> int:
        """Rounds of the next call of these rows, if there are pages for so many.

        Args:
          most: the caller's limit.
          reads: whether a row reads its prompt in the same plan.
          waits: whether a request waits for a row or for pages.
        """
        limits, crowds = self.limits, self._crowds(len(rows))
        rounds = self._for_load(crowds, reads=reads, waits=waits)
        rounds = min(rounds, most, max(row.most_rounds for row in rows))
        if limits.runs_all_rounds:
            rate = self._tokens / self._rounds
            expected = max(row.expected_rounds(rate) for row in rows)
            if expected > 1 and crowds and rounds == limits.max_rounds:
                expected = rounds  # there are programs of all rounds or one: many would be launched
            rounds = max(1, min(rounds, expected))
        if any(row.masked for row in rows):
            rounds = min(rounds, MASKED_ROUNDS)
        if limits.unseen_rounds and 2 * sum(row.is_unseen for row in rows) > len(rows):
            rounds = min(rounds, max(limits.unseen_rounds, self._few(crowds)))
        return rounds

    def _crowds(self, num_rows: int) -> int:
        """How many rounds take the device as long as the host needs for a call, all but one."""
        return num_rows // (self.limits.crowded_rows or num_rows + 1)

    def _few(self, crowds: int) -> int:
        """Rounds of a short call."""
        limits = self.limits
        if crowds and limits.runs_all_rounds:
            return limits.max_rounds
        return min(1 + crowds, limits.max_rounds)

    def _for_load(self, crowds: int, *, reads: bool, waits: bool) -> int:
        limits = self.limits
        if reads or waits:
            self._next = limits.max_rounds if limits.runs_all_rounds else 1
            return self._few(crowds)
        rounds = self._next
        self._next = min(2 * rounds, limits.max_rounds)
        return rounds
