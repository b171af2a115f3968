"""Notices a drafter of which almost nothing is accepted."""

import warnings
from collections.abc import Callable, Iterable

import jax
import numpy as np

from jaxspec.decoding.drafters import Drafter
from jaxspec.engine.programs.call import LaunchedCall

FEWEST, MOST = 100, 200  # rounds that are counted before anything is said, and at most
LEAST_ACCEPTED = 0.05  # of these rounds accept their first drafted token


class DraftWatch:
    """Counts an engine's first rounds, and says once if hardly any accepted a drafted token.

    It reads on the host what calls have emitted anyway. Drafters without weights are not watched:
    lookup finds nothing in text that does not repeat, and that is no mistake.

    Attributes:
      told: whether it was said. Nothing more is then counted.
      on_warning: what is called with the message; by default warnings.warn.
    """

    def __init__(self, drafter: Drafter):
        self.told = False
        self.on_warning: Callable[[str], object] = warnings.warn
        self.restart(drafter)

    def restart(self, drafter: Drafter) -> None:
        """Forget what was counted: the rounds were no real requests', or of another drafter."""
        self._name, self._rounds, self._accepted = type(drafter).__name__, 0, 0
        self._counts = bool(jax.tree.leaves(drafter)) and not self.told

    def add(self, calls: Iterable[LaunchedCall]) -> None:
        """Count the rounds of calls that were read, and warn if there are enough of them."""
        if not self._counts:
            return
        for call in calls:
            counts, accepted, drafted = (
                np.asarray(x)
                for x in (call.emitted.counts, call.emitted.accepted, call.emitted.drafted)
            )  # int32 [C, B] each
            ran = (counts > 0) & (drafted > 0) & bool(call.emitted.num_rounds)
            self._rounds += int(ran.sum())
            self._accepted += int((accepted[ran] > 0).sum())
        if self._rounds >= FEWEST and self._accepted < LEAST_ACCEPTED * self._rounds:
            self.told, self._counts = True, False
            self.on_warning(self._message())
        elif self._rounds >= MOST:
            self._counts = False

    def _message(self) -> str:
        share = self._accepted / self._rounds
        return (
            f"the drafter ({self._name}) is of no use here: {self._accepted} of the first "
            f"{self._rounds} rounds accepted a drafted token ({share:.1%}). Plain decoding is "
            "faster. Likely causes: the drafter was made for another model or another fine-tune of "
            "it, its embeddings or the hidden states that it reads are not those that it was "
            "trained with, the prompts lack the chat template that it was trained on, or the "
            "temperature is high"
        )
