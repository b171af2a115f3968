"""P-values of two tests. scipy.special has what they need; scipy.stats takes half a second to
import, in every worker."""

from collections.abc import Callable

import numpy as np
from scipy.special import chdtrc, kolmogorov


def chi_square(found: np.ndarray, expected: np.ndarray, freedom: int | None = None) -> float:
    """Of counts, where others are expected; ``freedom``: one less than there are, unless given."""
    statistic = ((found - expected) ** 2 / expected).sum()
    return float(chdtrc(found.size - 1 if freedom is None else freedom, statistic))


def of_one_distribution(counts: np.ndarray) -> float:
    """Of the rows of a table of counts: that they are draws from one distribution."""
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
    return chi_square(counts, expected, (len(counts) - 1) * (counts.shape[1] - 1))


def kolmogorov_smirnov(
    draws: np.ndarray, distribution: Callable[[np.ndarray], np.ndarray]
) -> float:
    """Of many draws, and the probability of at most each value."""
    below, count = distribution(np.sort(draws)), draws.size
    above = np.arange(1, count + 1) / count - below
    distance = max(above.max(), 1 / count - above.min())
    return float(kolmogorov(np.sqrt(count) * distance))
