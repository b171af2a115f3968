"""What a round costs, by shape and rows: as measured, or as the calls that serve correct it."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxspec.config.speculation import TreeShape

MEMORY = 16.0  # calls of a size and shape that are remembered
PRIOR_WEIGHT = 2.0  # of what other sizes and shapes tell about one, in calls
ROUNDS_MEMORY = 1024.0  # rounds of rows of which is remembered how many tokens they verified
LARGEST_STEP = 0.7  # of a logarithm by which one call may differ from those before: others compute


class Costs(Protocol):
    """Seconds of a round by rows and shape."""

    @property
    def call(self) -> float:
        """Seconds that a call takes besides its rounds."""
        ...

    def seconds(self, rows: int, shape: TreeShape) -> float:
        """Seconds of a round of a program of so many rows."""
        ...


class CostsByTokens(Protocol):
    """Costs that depend on how many tokens of a tree are verified."""

    @property
    def call(self) -> float: ...

    def seconds(self, rows: int, shape: TreeShape, drafted: float | None = None) -> float:
        """Seconds of a round of trees of which so many drafted tokens are verified on average.
        None: all."""
        ...


class VerifiedCosts:
    """Costs of trees that verify as many tokens as their rounds have verified so far.

    A drafter may draft fewer tokens than its tree holds, or end a chain that is not worth more.
    """

    def __init__(self, prior: CostsByTokens):
        self.prior = prior
        self._seen: dict[TreeShape, tuple[float, float]] = {}  # mean of drafted tokens, rounds

    @property
    def call(self) -> float:
        return self.prior.call

    def observe(self, shape: TreeShape, drafted: np.ndarray) -> None:
        """Rounds of rows have verified so many drafted tokens: int [n]."""
        if not drafted.size:
            return
        mean, rounds = self._seen.get(shape, (0.0, 0.0))
        rounds = min(rounds, ROUNDS_MEMORY)
        total = rounds + drafted.size
        self._seen[shape] = (rounds * mean + float(drafted.sum())) / total, total

    def seconds(self, rows: int, shape: TreeShape) -> float:
        mean, rounds = self._seen.get(shape, (0.0, 0.0))
        return self.prior.seconds(rows, shape, mean if rounds else None)


class RoundCosts:
    """Seconds of a round by shape and rows, from a few measured points.

    Args:
      measured: seconds by (rows, shape); rows are those of the compiled program.
      call: seconds that a call takes besides its rounds.
    """

    def __init__(self, measured: Mapping[tuple[int, TreeShape], float], call: float = 0.0):
        self._call = call
        points: dict[TreeShape, list[tuple[int, float]]] = {}
        for (rows, shape), seconds in measured.items():
            points.setdefault(shape, []).append((rows, seconds))
        self._curves = {shape: _rising(sorted(curve)) for shape, curve in points.items()}

    @property
    def call(self) -> float:
        return self._call

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """Those that were measured, with fewer nodes first."""
        return tuple(sorted(self._curves, key=lambda shape: (shape.num_nodes, shape.max_depth)))

    def seconds(self, rows: int, shape: TreeShape) -> float:
        """Seconds of a round of so many rows, padded to a power of two as programs are.

        Between measured points on a straight line; never less for more rows. Past the last point
        the last line goes on.

        Raises KeyError for a shape that was not measured.
        """
        sizes, times = self._curves[shape]
        size = _padded(rows)
        if size <= sizes[-1]:
            return float(np.interp(size, sizes, times))
        before = (sizes[-2], times[-2]) if len(sizes) > 1 else (0, 0.0)
        slope = (times[-1] - before[1]) / (sizes[-1] - before[0])
        return float(times[-1] + slope * (size - sizes[-1]))


class LearntCosts:
    """Costs as they are expected beforehand, corrected by the calls that serve.

    What calls took is remembered as a share of what was expected, by rows and shape. A point that
    no call has shown is expected to be off by the same share as those that calls have shown.
    """

    def __init__(self, prior: Costs):
        self.prior = prior
        self._seen: dict[tuple[int, TreeShape], tuple[float, float]] = {}  # log share, calls

    @property
    def call(self) -> float:
        return self.prior.call

    def observe(self, rows: int, shape: TreeShape, rounds: int, seconds: float) -> None:
        """A call of so many rounds took so long."""
        if rounds < 1 or seconds <= 0:
            return
        size = _padded(rows)
        share = math.log(seconds / rounds / self.prior.seconds(size, shape))
        expected = self._common() if self._seen else share
        mean, calls = self._seen.get((size, shape), (expected, 0.0))
        step = min(max(share - mean, -LARGEST_STEP), LARGEST_STEP)
        calls = min(calls + 1, MEMORY)
        self._seen[size, shape] = mean + step / calls, calls

    def seconds(self, rows: int, shape: TreeShape) -> float:
        """Seconds of a round, by the prior and what calls took."""
        size = _padded(rows)
        mean, calls = self._seen.get((size, shape), (0.0, 0.0))
        share = (calls * mean + PRIOR_WEIGHT * self._common()) / (calls + PRIOR_WEIGHT)
        return self.prior.seconds(size, shape) * math.exp(share)

    def _common(self) -> float:
        """The mean of all logarithms."""
        weights = sum(calls for _, calls in self._seen.values())
        return sum(mean * calls for mean, calls in self._seen.values()) / weights if weights else 0


def _padded(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()


def _rising(points: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and times. Noise of the measurement must not make more rows cheaper."""
    sizes, times = np.array(points, float).T
    return sizes, np.maximum.accumulate(times)
