"""Held-out batches; under a time budget, only the first ones are evaluated."""

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxspec.training.schedule import EVALUATION_SHARE, Schedule


class HeldOut[T]:
    """Batches to evaluate on, in a fixed shuffled order.

    Under a time budget the first evaluation stops when it has taken EVALUATION_SHARE of the time
    left, but after one batch at the earliest. Later evaluations use the same batches, so that their
    results can be compared.
    """

    def __init__(self, batches: Sequence[T], schedule: Schedule):
        order = np.random.default_rng(0).permutation(len(batches))
        self._batches = [batches[index] for index in order]
        self._deadline = schedule.deadline
        self._measured = False

    @property
    def first(self) -> T:
        """The first batch, for its shapes."""
        return self._batches[0]

    @property
    def batches(self) -> list[T]:
        """The batches that are evaluated."""
        return self._batches

    def evaluate[V](self, function: Callable[[T], V]) -> list[V]:
        """The result of ``function`` on each batch; waits for every result."""
        started, results = time.monotonic(), []
        until = None
        if self._deadline is not None and not self._measured:
            until = started + EVALUATION_SHARE * (self._deadline - started)
        for batch in self._batches:
            results.append(jax.block_until_ready(function(batch)))
            if until is not None and time.monotonic() >= until:
                break
        self._batches, self._measured = self._batches[: len(results)], True
        return results


def batches_of(rows: int, size: int) -> tuple[int, int]:
    """(number, size) of the batches that so many rows are enough for; the size is halved until
    there is one."""
    while size > rows:
        size = -(-size // 2)
    return rows // size, size
