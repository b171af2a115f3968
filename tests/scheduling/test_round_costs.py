"""Costs of rounds that calls correct."""

import numpy as np
import pytest

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.scheduling.round_costs import LearntCosts, RoundCosts, VerifiedCosts

CHAIN = TreeShape.parse("chain:3")


def new_costs() -> LearntCosts:
    """A round of a chain takes four times as long as one of plain decoding."""
    return LearntCosts(RoundCosts({(1, PLAIN): 1.0, (1, CHAIN): 4.0}))


def test_without_calls_they_are_the_prior():
    assert new_costs().seconds(1, CHAIN) == 4.0


def test_calls_of_one_shape_correct_it_and_nearly_as_much_all_others():
    costs = new_costs()
    for _ in range(20):
        costs.observe(1, PLAIN, rounds=8, seconds=24.0)
    assert costs.seconds(1, PLAIN) == pytest.approx(3.0)
    assert costs.seconds(1, CHAIN) == pytest.approx(12.0)  # the device is slower than expected
    for _ in range(20):
        costs.observe(1, CHAIN, rounds=1, seconds=6.0)
    assert costs.seconds(1, CHAIN) == pytest.approx(6.0, rel=0.1)
    assert costs.seconds(1, PLAIN) == pytest.approx(3.0, rel=0.1)


def test_one_slow_call_changes_little():
    costs = new_costs()
    for _ in range(20):
        costs.observe(1, PLAIN, rounds=1, seconds=1.0)
    costs.observe(1, PLAIN, rounds=1, seconds=100.0)
    assert costs.seconds(1, PLAIN) < 1.1


def test_one_slow_call_of_what_was_never_seen_changes_it_by_no_more_than_twice():
    costs = new_costs()
    for _ in range(20):
        costs.observe(1, PLAIN, rounds=1, seconds=1.0)
    costs.observe(1, CHAIN, rounds=4, seconds=160.0)
    assert 4.0 < costs.seconds(1, CHAIN) < 8.5
    for _ in range(20):
        costs.observe(1, CHAIN, rounds=4, seconds=16.0)
    assert costs.seconds(1, CHAIN) == pytest.approx(4.0, rel=0.1)


def test_calls_that_ran_no_round_tell_nothing():
    costs = new_costs()
    costs.observe(1, PLAIN, rounds=0, seconds=5.0)
    assert costs.seconds(1, PLAIN) == 1.0


class OfTokens:
    """A second for each verified token, the root included, and two for the width of a tree."""

    call = 0.5

    def seconds(self, rows: int, shape: TreeShape, drafted: float | None = None) -> float:
        return rows * (3 + (shape.max_depth if drafted is None else drafted))


def test_a_tree_costs_what_its_rounds_have_verified():
    costs = VerifiedCosts(OfTokens())
    assert costs.call == 0.5
    costs.observe(CHAIN, np.array([], np.int32))
    assert costs.seconds(2, CHAIN) == 2 * (3 + 3)
    costs.observe(CHAIN, np.array([1, 0, 2, 1], np.int32))
    assert costs.seconds(2, CHAIN) == 2 * (3 + 1)
    assert costs.seconds(1, TreeShape.parse("chain:5")) == 8  # not seen yet
    for _ in range(200):
        costs.observe(CHAIN, np.full(64, 3))
    assert costs.seconds(1, CHAIN) == pytest.approx(6, rel=0.01)  # what was first is forgotten
