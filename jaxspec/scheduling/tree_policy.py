"""Which draft tree a call should use: the one that commits the most tokens a second, or none.

All rows of a call draft trees of one shape. What a round costs is known from round_costs; what it
yields is estimated from what rows have accepted (see acceptance_estimate).
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from jaxspec.config.speculation import TreeShape
from jaxspec.scheduling.acceptance_estimate import AcceptanceEstimate, family_of
from jaxspec.scheduling.round_costs import Costs

SHORT_CALL = 4  # rounds of a call that explores
ENOUGH_SEEN = 32  # rounds of a family: before that, calls are short
# What n rounds of a family yield may be this much better on average than they showed, divided by
# the square root of n: about the deviation of one round, as a share. An estimate from other
# families is worth a few rounds.
DEVIATION = 0.7
LEAST_SEEN = 4
# Of a drafter that listens: rows are taken to be harder than those before them by such log-odds,
# somewhat less than the deviation of rows. Until so many tokens of a row were heard, calls are
# short. And the latest row has this share in what is expected of the next: kinds come in turn.
CAUTION, ENOUGH_HEARD, NEWEST = 0.75, 16, 0.25
# A better shape is compiled at once if it gains so much, or when as many seconds were lost without
# it: compiling slows the calls for a while.
WORTH_COMPILING, LOST_SECONDS = 0.3, 2.0
SAVED_SECONDS = 5.0  # of serving: what they earn for the first rounds of new rows is kept


class TreePolicy:
    """Chooses the shape of each call, and learns from what calls accepted.

    >>> plan = scheduler.plan(now, policy.most_rounds)
    >>> shape = policy.choose(request_ids, costs, rounds=plan.rounds)
    >>> policy.estimate.observe(request_ids, shape, accepted, committed)  # also after more choices
    >>> policy.estimate.forget(request_id)  # it has ended

    It stays with a shape unless another is better by more than ``hysteresis``. Where nothing, or
    only short chains, are drafted, the estimates of what else could be grow old. So now and then a
    short call tries the most promising other shape. These calls are expected to cost at most
    ``exploration`` of the time, and cost at most four times that if nothing new is accepted. What
    is hardly known is tried at once, as long as it may be the best. Where plain decoding is the
    best for rows most of which have shown nothing yet, their first calls draft: a crowd of new
    requests may be unlike those before it. That costs at most the same share of the time again.
    Before any tree was tried it takes the deepest that is expected to be no slower than plain
    decoding: that one shows the most.

    Where plain rounds tell what a drafter that ``listens`` would have had accepted, that costs next
    to nothing. So no first calls draft then, nothing is tried only because it is new, and drafting
    begins once a row, or those before it, have shown enough for it to pay.

    Args:
      shapes: those that may be chosen; plain decoding must be one.
      hysteresis: least gain, as a share, for which the shape changes.
      exploration: share of the time that trying may cost.
      short_call: rounds of a call that tries a shape.
      listens: whether plain rounds tell what the first token of a chain would have been: see
        AcceptanceEstimate.hear. It counts where a plain program is known to be ready.

    Attributes:
      estimate: what it has learnt.
      best: the best shape, were all of them ready; ``wanted``: it or one that may be better, which
        is not ready.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        *,
        hysteresis: float = 0.01,
        exploration: float = 0.005,
        short_call: int = SHORT_CALL,
        listens: bool = False,
    ):
        self.shapes = tuple(shapes)
        self.estimate = AcceptanceEstimate(shapes, newest=NEWEST if listens else 0.0)
        self.hysteresis, self.exploration = hysteresis, exploration
        self.short_call, self.listens = short_call, listens
        self.shape: TreeShape | None = None  # of the last call that did not explore
        self.most_rounds: int | None = short_call
        """Most rounds of the next call: it may explore, or too little is known. None: any."""
        drafting = [shape for shape in self.shapes if not shape.is_plain]
        self._credit = {family_of(shape): 0.0 for shape in drafting}  # seconds
        self._first_credit = 0.0  # seconds, for the first rounds of new rows
        self._lost = 0.0  # seconds, since the best shape was ready or began to be compiled
        self.best: TreeShape | None = None
        self.wanted: TreeShape | None = None

    def choose(
        self,
        rows: Sequence[Hashable],
        costs: Costs,
        *,
        rounds: int = 1,
        size: int | None = None,
        ready: Mapping[TreeShape, int] | None = None,
    ) -> TreeShape:
        """The shape of the next call.

        Args:
          rows: keys of the rows that decode.
          rounds: of the call.
          size: rows of the program that will run; None: the number of rows.
          ready: shapes that can run at once, at least one, with the rows of the programs that do;
            None: all, with ``size`` rows.
        """
        listens = self.listens and ready is not None
        hazards = self.estimate.hazards(rows, harder=CAUTION if listens else 0.0)
        sizes = dict.fromkeys(self.shapes, size or len(rows))
        outlook = _Outlook(self.shapes, hazards, self.estimate, costs, sizes, listens)
        if not any(self.estimate.rounds_seen(shape) for shape in self.shapes if shape.max_depth):
            outlook.best = outlook.deepest_no_slower_than_plain()
        self.best, self.wanted = outlook.best, None
        if ready is not None and ready != sizes:
            of_all, shapes = outlook, tuple(ready)
            outlook = _Outlook(shapes, hazards, self.estimate, costs, ready, listens)
            self.wanted = self._wanted(of_all, outlook, sizes, rounds)
        self.shape = best = outlook.pick(self.shape, self.hysteresis)
        candidates = outlook.candidates()
        first = self._first_look(outlook, rows, rounds)
        explored = first or self._explore(outlook, candidates, rounds)
        due = any(self._affordable(outlook, shape, self.short_call) for shape in candidates)
        is_short = due or self._is_new(best) or (listens and self._must_hear(rows))
        self.most_rounds = self.short_call if is_short else None
        return explored or best

    def first(self, costs: Costs, size: int) -> TreeShape:
        """The shape of the first rounds of all, of one new row in a program of so many."""
        hazards, sizes = self.estimate.hazards([0]), dict.fromkeys(self.shapes, size)
        outlook = _Outlook(self.shapes, hazards, self.estimate, costs, sizes, self.listens)
        return outlook.deepest_no_slower_than_plain()

    def expect(self, rows: Sequence[Hashable], costs: Costs, size: int) -> tuple[TreeShape, float]:
        """The best shape for such rows, in programs of so many, and the share of plain decoding's
        time that it is expected to save. Nothing is chosen."""
        hazards, sizes = self.estimate.hazards(rows), dict.fromkeys(self.shapes, size)
        outlook = _Outlook(self.shapes, hazards, self.estimate, costs, sizes, self.listens)
        plain = max(outlook.rate(shape) for shape in self.shapes if shape.is_plain)
        return outlook.best, 1 - plain / outlook.rate(outlook.best)

    def _wanted(
        self, outlook: "_Outlook", ready: "_Outlook", sizes: Mapping[TreeShape, int], rounds: int
    ) -> TreeShape | None:
        """What is not ready and should be: the best shape if it gains enough, or else one that may
        be better. ``outlook`` is that of all shapes."""
        better = [each for each in outlook.candidates() if self._may_be_best(outlook, each)]
        gain = outlook.rate(outlook.best) / ready.rate(ready.best) - 1
        lost = rounds * ready.seconds[ready.best] * gain / (1 + gain)
        self._lost = self._lost + lost if gain > 0 else 0.0
        if gain > WORTH_COMPILING or self._lost > LOST_SECONDS:
            better.insert(0, outlook.best)
        return next((each for each in better if ready.sizes.get(each) != sizes[each]), None)

    def began_to_compile(self) -> None:
        """What was wanted is coming."""
        self._lost = 0.0

    def _first_look(
        self, outlook: "_Outlook", rows: Sequence[Hashable], rounds: int
    ) -> TreeShape | None:
        """The cheapest shape that drafts, for rows of which plain decoding would show nothing."""
        drafting = [shape for shape in outlook.shapes if not shape.is_plain]
        if not drafting or outlook.listens:
            return None
        shape = min(drafting, key=outlook.loss)
        price = rounds * outlook.loss(shape)
        new = sum(not self.estimate.knows(row) for row in rows)
        if outlook.best.is_plain and 2 * new > len(rows) and price <= self._first_credit:
            self._first_credit -= price
            return shape
        earned = rounds * outlook.seconds[outlook.best] * self.exploration
        self._first_credit = min(self._first_credit + earned, SAVED_SECONDS * self.exploration)
        return None

    def _explore(
        self, outlook: "_Outlook", candidates: Sequence[TreeShape], rounds: int
    ) -> TreeShape | None:
        """A shape to try in place of the best, if it can be afforded; else time earns credit."""
        for shape in candidates:
            if self._affordable(outlook, shape, rounds):
                family = family_of(shape)
                price = self._price(outlook, shape, rounds)
                self._credit[family] -= min(self._credit[family], price)
                return shape
        earned = rounds * outlook.seconds[outlook.best] * self.exploration / max(len(candidates), 1)
        for shape in candidates:
            # No more than one call costs: what is saved up must not pay for many in a row.
            most = max(self._price(outlook, shape, count) for count in (rounds, self.short_call))
            family = family_of(shape)
            self._credit[family] = min(self._credit[family] + earned, most)
        return None

    def _affordable(self, outlook: "_Outlook", shape: TreeShape, rounds: int) -> bool:
        if self.exploration == 0:
            return False
        is_new = self._is_new(shape) and not outlook.listens
        if rounds <= self.short_call and is_new and self._may_be_best(outlook, shape):
            return True
        return self._price(outlook, shape, rounds) <= self._credit[family_of(shape)]

    def _is_new(self, shape: TreeShape) -> bool:
        return not shape.is_plain and self.estimate.rounds_seen(shape) < ENOUGH_SEEN

    def _must_hear(self, rows: Sequence[Hashable]) -> bool:
        """Whether most rows have shown too little for a long call."""
        return 2 * int((self.estimate.shown(rows) < ENOUGH_HEARD).sum()) > len(rows)

    def _may_be_best(self, outlook: "_Outlook", shape: TreeShape) -> bool:
        """Whether the few rounds that were seen do not show that another shape is better."""
        seen = max(self.estimate.rounds_seen(shape), LEAST_SEEN)
        return outlook.rate(shape) * (1 + DEVIATION / seen**0.5) > outlook.rate(outlook.best)

    def _price(self, outlook: "_Outlook", shape: TreeShape, rounds: int) -> float:
        """Seconds that a call is expected to lose. A short one would be part of another if it did
        not try something."""
        extra = outlook.call_seconds if rounds <= self.short_call else 0.0
        return rounds * outlook.loss(shape) + extra


class _Outlook:
    """What a round of each shape costs, and is expected to yield, for the rows of one call.

    Args:
      hazards: of the rows, float64 [B, families, depths].
      sizes: rows of the program of each shape.
      listens: whether plain rounds show the first depth of chains.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        hazards: np.ndarray,
        estimate: AcceptanceEstimate,
        costs: Costs,
        sizes: Mapping[TreeShape, int],
        listens: bool = False,
    ):
        self.shapes, self.sizes, self.listens = shapes, sizes, listens
        self.num_rows, self.call_seconds = len(hazards), costs.call
        self.seconds = {shape: costs.seconds(sizes[shape], shape) for shape in shapes}
        # Rows that are expected to accept a token at each depth.
        self.expected = {shape: estimate.survival(hazards, shape).sum(axis=0) for shape in shapes}
        self.best = max(shapes, key=self.rate)

    def pick(self, current: TreeShape | None, hysteresis: float) -> TreeShape:
        """The best shape from now on: the current one, unless another is clearly better."""
        stays = self.rate(self.best) / (1 + hysteresis)
        if current is not None and current in self.seconds and self.rate(current) >= stays:
            self.best = current
        return self.best

    def deepest_no_slower_than_plain(self) -> TreeShape:
        """The deepest shape that is expected to be no slower than plain decoding."""
        plain = max((self.rate(shape) for shape in self.shapes if shape.is_plain), default=0.0)
        return max(
            (shape for shape in self.shapes if self.rate(shape) >= plain),
            key=lambda shape: (shape.max_depth, shape.num_nodes),
        )

    def rate(self, shape: TreeShape) -> float:
        """Expected tokens a second."""
        return (self.num_rows + float(self.expected[shape].sum())) / self.seconds[shape]

    def candidates(self) -> list[TreeShape]:
        """The most promising shape of each family, of those that show more than the best one does
        and could be better."""
        found: dict[TreeShape | None, TreeShape] = {}
        for shape in sorted(self.shapes, key=self.rate, reverse=True):
            shows_more = shape.max_depth > len(self._known(shape))
            if shows_more and self._highest_rate(shape) > self.rate(self.best):
                found.setdefault(family_of(shape), shape)
        return list(found.values())

    def loss(self, shape: TreeShape) -> float:
        """Seconds that a round of this shape is expected to lose. The estimate may be too good, so
        at least a quarter of what is lost if it accepts only what the best one would."""
        best_rate = self.rate(self.best)
        least = self.num_rows + float(self._known(shape).sum())
        worst = max(0.0, self.seconds[shape] - least / best_rate)
        return max(self.seconds[shape] * (1 - self.rate(shape) / best_rate), worst / 4)

    def _highest_rate(self, shape: TreeShape) -> float:
        """Tokens a second, if it accepted all that the best one does not show."""
        known = self._known(shape)
        survivors = known[-1] if len(known) else self.num_rows
        most = self.num_rows + known.sum() + survivors * (shape.max_depth - len(known))
        return float(most) / self.seconds[shape]

    def _known(self, shape: TreeShape) -> np.ndarray:
        """What rounds of the best one show of this shape: rows that are expected to accept a token,
        float64 [depths]."""
        best = self.best
        if family_of(best) != family_of(shape):
            return np.zeros(0)
        if best.is_plain:  # shown by what the drafter hears
            return self.expected[shape][:1] if self.listens else np.zeros(0)
        return self.expected[best]
