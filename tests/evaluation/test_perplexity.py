"""Perplexity, and differences of it on the same text."""

import numpy as np
import pytest

from jaxspec.evaluation.perplexity import Scores, difference, summarize


def test_differences_are_paired():
    """Their intervals are narrow where sequences differ much and the difference does not."""
    rng = np.random.default_rng(0)
    counts = np.full(50, 10)
    nats = rng.uniform(5, 30, 50)
    before, after = (Scores(own, counts) for own in (nats, nats + 0.5))
    worse, (low, high) = difference(before, after)
    assert worse == pytest.approx(0.05) and low == pytest.approx(0.05) == high
    found = summarize(before)
    low, high = found.nats_interval
    assert low < found.nats < high and high - low > 0.05
    assert found.perplexity == pytest.approx(np.exp(nats.sum() / 500))


def test_sequences_count_by_their_tokens():
    found = summarize(Scores(np.array([np.log(2) + np.log(4), np.log(2)]), np.array([2, 1])))
    assert found.perplexity == pytest.approx(16 ** (1 / 3)) and found.tokens == 3
