"""How the rows that read share the prompt tokens of a plan."""

from jaxspec.scheduling.plan import Limits

MOST_PASSED_OVER = 3  # plans in a row that read only of prompts that came later, and are shorter


class ReadingShares:
    """Shares the budget of each plan: fairly, and what is too small to share among the shortest.

    Prompts that are nearly read come first, since each then waits for the fewest others. But the
    earliest one gets some at the latest after MOST_PASSED_OVER plans.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self._passed_over = 0  # plans in a row in which the earliest got nothing

    def choose(self, left: list[int]) -> list[int]:
        """Tokens that each row reads, of those that are ``left`` of its prompt; the earliest row
        is the first."""
        limits, waits = self.limits, self._passed_over >= MOST_PASSED_OVER
        ranked = sorted(range(len(left)), key=lambda row: (row > 0 or not waits, left[row]))
        most = limits.largest_read or limits.prefill_budget
        wanted = [min(left[row], most) for row in ranked]
        shares = fair_shares(wanted, limits.prefill_budget, limits.least_read, serves_first=waits)
        counts = [0] * len(left)
        for row, share in zip(ranked, shares, strict=True):
            counts[row] = share
        self._passed_over = self._passed_over + 1 if 0 in counts[:1] else 0
        return counts


def fair_shares(
    wanted: list[int], budget: int, least: int = 1, *, serves_first: bool = True
) -> list[int]:
    """A budget shared so that the smallest share is as large as possible, then the next, ...

    Those who want little get it all; the others get equal shares of the rest. Nobody gets fewer
    than ``least`` but who wants no more, or gets what is left, or nothing. With ``serves_first``
    the first gets some, too.
    """
    shares, kept = [0] * len(wanted), min([*wanted[:1], least]) if serves_first else 0
    for place, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        kept = 0 if index == 0 else kept
        share = max(least, budget // (len(wanted) - place))
        shares[index] = min(wanted[index], share, budget - kept)
        budget -= shares[index]
    return shares
