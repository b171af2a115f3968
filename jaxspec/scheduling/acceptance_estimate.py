"""How many drafted tokens the target accepts: estimates by row, family of trees and depth.

The estimates are of hazards: of the rounds that accepted ``d - 1`` tokens, the share that accepted
the next one. Their products are the survival: the probability that at least ``d`` are accepted.
A round tells nothing of depths that its tree did not have, or that the end of the text cut off;
such rounds are not counted there, so the estimates are unbiased (Kaplan and Meier's estimator).
A drafter that proposes fewer tokens than it might counts as not accepted: that is what a call of
this shape yields.

Chains are one family: a short one drafts the first tokens of a longer one. Every other tree is a
family of its own, since wider trees survive longer. What a row has shown fades while it decodes
plainly.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.config.speculation import FIRST_ACCEPTANCE, TREE_POWER, TreeShape

FIRST_WEIGHT = 2.0  # in rounds
ROW_WEIGHT = 8.0  # of what other rows tell about one, in rounds
OFFSET_LIMIT = 4.0
MUCH_SHOWN = 16  # rounds of a row, or tokens that were heard
PLAIN_MEMORY = 16  # plain rounds after which what a row has shown has faded: its text went on


class Rounds(NamedTuple):
    """What rounds of a call tell, of each row and depth."""

    tries: np.ndarray  # float64 [B, D], rounds that could accept
    hits: np.ndarray  # float64 [B, D], those that did
    kept: np.ndarray  # float64 [B], weight that is left to earlier rounds


def count_rounds(
    accepted: np.ndarray, committed: np.ndarray, depth: int, forget: float = 0.0
) -> Rounds:
    """Count the rounds of a call, the later ones with more weight.

    Args:
      accepted: int [C, B], drafted tokens accepted, those past the end of a text included.
      committed: int [C, B], tokens committed; 0 where a row did not run.
      depth: of the trees.
      forget: share of its weight that a round loses with each later one of its row.
    """
    accepted, committed = np.asarray(accepted), np.asarray(committed)
    ran = committed > 0
    later = np.cumsum(ran[::-1], axis=0)[::-1] - ran
    weight = np.where(ran, (1 - forget) ** later, 0.0)[..., None]
    depths = np.arange(1, depth + 1)
    # A text that ended kept fewer tokens than were accepted: what follows them means nothing.
    seen = depths <= np.where(committed <= accepted, committed, depth)[..., None]
    reached = seen & (accepted[..., None] >= depths - 1)
    return Rounds(
        tries=(weight * reached).sum(axis=0),
        hits=(weight * (reached & (accepted[..., None] >= depths))).sum(axis=0),
        kept=(1 - forget) ** ran.sum(axis=0),
    )


class AcceptanceEstimate:
    """Survival by depth, of every row and family, from what the row and all rows have shown.

    Rounds are forgotten exponentially. A new row is expected to be like those before it. What it
    shows moves all its hazards together (one offset in log-odds), and each by itself as rounds
    accumulate. Hazards at depths that no row has reached are those of the depth before; a tree that
    was never tried is derived from the chain (TREE_POWER).

    Args:
      shapes: of the calls; plain ones tell nothing and are ignored.
      memory: rounds of a row that are remembered.
      shared_memory: rounds of all rows together.
      newest: share of the latest row that has ended, if it has shown much, in what is expected of
        new ones; 0: all its rounds count alike.
    """

    def __init__(
        self,
        shapes: Iterable[TreeShape],
        *,
        memory: float = 64,
        shared_memory: float = 1024,
        newest: float = 0.0,
    ):
        shapes = [shape for shape in shapes if not shape.is_plain]
        # Chains first, also if there are none: the others are derived from them.
        self.families = tuple(dict.fromkeys([None, *map(family_of, shapes)]))
        self.max_depth = max((shape.max_depth for shape in shapes), default=0)
        self._forget, self._forget_shared = 1 / memory, 1 / shared_memory
        self._newest = newest
        # Tries and hits; see Rounds.
        self._shared = np.zeros((2, len(self.families), self.max_depth))
        self._counts = np.zeros((1, *self._shared.shape))  # by slot; slot 0 stays empty
        self._slots: dict[Hashable, int] = {}  # of rows that have shown something
        self._free: list[int] = []
        self._heard: dict[Hashable, np.ndarray] = {}

    def _slot(self, row: Hashable) -> int:
        if row not in self._slots:
            if not self._free:
                size = len(self._counts)
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._free = list(range(size, 2 * size))
            self._slots[row] = self._free.pop()
        return self._slots[row]

    def observe(
        self,
        rows: Sequence[Hashable],
        shape: TreeShape,
        accepted: np.ndarray,
        committed: np.ndarray,
    ) -> None:
        """Add the rounds of a call of this shape: int [C, B] each, see count_rounds.

        Plain rounds show nothing, and what their rows showed before grows old: a text that begins
        to repeat itself would never be drafted again. No row may be listed twice.
        """
        if shape.is_plain:
            known = [(self._slots[row], at) for at, row in enumerate(rows) if row in self._slots]
            if known:
                slots, columns = map(list, zip(*known, strict=True))
                ran = np.count_nonzero(np.asarray(committed)[:, columns], axis=0)
                self._counts[slots] *= (1 - 1 / PLAIN_MEMORY) ** ran[:, None, None, None]
            return
        family, depth = self.families.index(family_of(shape)), shape.max_depth
        new = count_rounds(accepted, committed, depth, self._forget)
        slots = [self._slot(row) for row in rows]
        # Forget of other families too, and of deeper levels: a row's text has changed since.
        self._counts[slots] *= new.kept[:, None, None, None]
        self._counts[slots, :, family, :depth] += np.stack([new.tries, new.hits], axis=1)
        every = count_rounds(accepted, committed, depth)
        shared = self._shared[:, family]
        shared *= (1 - self._forget_shared) ** np.count_nonzero(committed)
        shared[:, :depth] += np.stack([every.tries, every.hits]).sum(axis=1)

    def hear(self, rows: Sequence[Hashable], totals: np.ndarray) -> None:
        """Add what plain rounds have shown of a drafter that listens: int [B, 2], the tokens of
        each row that it was compared with, and those that it would have drafted. They are all of
        the row, so what was added before is not added again; where the row was read anew they
        begin at 0. A token tells of depth 1 as a round does. No row may be listed twice."""
        for row, total in zip(rows, np.asarray(totals, float), strict=True):
            before = self._heard.get(row, np.zeros(2))
            new = total - before if total[0] >= before[0] else total
            if not new[0]:
                continue
            self._heard[row] = total
            slot, shared = self._slot(row), self._shared[:, 0, 0]
            self._counts[slot] *= (1 - self._forget) ** new[0]
            self._counts[slot, :, 0, 0] += new
            shared *= (1 - self._forget_shared) ** new[0]
            shared += new

    def forget(self, row: Hashable) -> None:
        """The row has ended. What it told about others stays."""
        self._heard.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            shown = float(self._counts[slot, 0, :, 0].sum())
            self._shared *= 1 - self._newest * min(1.0, shown / MUCH_SHOWN)
            self._counts[slot] = 0
            self._free.append(slot)

    def knows(self, row: Hashable) -> bool:
        """Whether the row has shown something."""
        return row in self._slots

    def rounds_seen(self, shape: TreeShape) -> float:
        """Rounds of all rows that are remembered of the shape's family."""
        return float(self._shared[0, self.families.index(family_of(shape)), :1].sum())

    def shown(self, rows: Sequence[Hashable]) -> np.ndarray:
        """Rounds, and tokens that were heard, that are remembered of each row: float64 [B]."""
        return self._counts[[self._slots.get(row, 0) for row in rows], 0, :, 0].sum(axis=-1)

    def hazards(self, rows: Sequence[Hashable], harder: float = 0.0) -> np.ndarray:
        """Probability to accept one more token: float64 [B, families, depths].

        ``harder``: log-odds by which rows may be harder than those before them.
        """
        counts = self._counts[[self._slots.get(row, 0) for row in rows]]
        tries, hits = np.moveaxis(counts, 1, 0)
        first = _log_odds(self._shared_hazards()) - harder
        expected = _probability(first + _offsets(tries, hits, first))
        return (hits + ROW_WEIGHT * expected) / (tries + ROW_WEIGHT)

    def survival(self, hazards: np.ndarray, shape: TreeShape) -> np.ndarray:
        """Probability to accept at least d = 1, 2, ... max_depth tokens: float64 [B, max_depth].

        ``hazards`` are those of some rows.
        """
        if shape.is_plain:
            return np.zeros((len(hazards), 0))
        family = self.families.index(family_of(shape))
        return np.cumprod(hazards[:, family, : shape.max_depth], axis=1)

    def _shared_hazards(self) -> np.ndarray:
        """Hazards of a row that nothing is known of: float64 [families, depths]."""
        tries, hits = self._shared
        hazards = np.empty_like(tries)
        before = FIRST_ACCEPTANCE
        for depth in range(self.max_depth):
            before = (hits[0, depth] + FIRST_WEIGHT * before) / (tries[0, depth] + FIRST_WEIGHT)
            hazards[0, depth] = before
        of_trees = 1 - (1 - hazards[0]) ** TREE_POWER
        hazards[1:] = (hits[1:] + FIRST_WEIGHT * of_trees) / (tries[1:] + FIRST_WEIGHT)
        return hazards


def family_of(shape: TreeShape) -> TreeShape | None:
    """Shapes of one family share their estimates. None: the chains."""
    return None if shape.is_chain else shape


def _offsets(tries: np.ndarray, hits: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """How much easier each row is than others: log-odds [B, 1, 1].

    The likeliest value, if those of rows are normally distributed with a deviation of 1.
    """
    offset = np.zeros((len(tries), 1, 1))
    for _ in range(4):  # Newton's steps; limited, since the first may be too long
        expected = _probability(shared + offset)
        slope = (hits - tries * expected).sum(axis=(1, 2), keepdims=True) - offset
        curve = (tries * expected * (1 - expected)).sum(axis=(1, 2), keepdims=True) + 1
        step = np.clip(slope / curve, -1, 1)
        offset = np.clip(offset + step, -OFFSET_LIMIT, OFFSET_LIMIT)
    return offset


def _log_odds(probability: np.ndarray) -> np.ndarray:
    probability = np.clip(probability, 1e-3, 1 - 1e-3)
    return np.log(probability / (1 - probability))


def _probability(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))
