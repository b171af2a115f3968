"""Ratios of sums and medians over samples, with 95 % bootstrap intervals."""

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000

Interval = tuple[float, float]


def ratio(sums: np.ndarray, counts: np.ndarray, seed: int = 0) -> tuple[float, Interval]:
    """Sum of ``sums`` over sum of ``counts``, and its interval over the N samples.

    Args:
      sums: float [N].
      counts: [N], not all 0.
    """
    chosen = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    chosen = chosen[counts[chosen].sum(axis=1) > 0]
    resampled = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    return float(sums.sum() / counts.sum()), _interval(resampled)


def median(samples: np.ndarray, seed: int = 0) -> tuple[float, Interval]:
    """Median of ``samples``, float [N], not empty, and its interval."""
    chosen = np.random.default_rng(seed).integers(len(samples), size=(RESAMPLES, len(samples)))
    return float(np.median(samples)), _interval(np.median(samples[chosen], axis=1))


def _interval(resampled: np.ndarray) -> Interval:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return float(low), float(high)
