"""Costs of rounds that calls correct."""

import pytest

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.scheduling.round_costs import LearntCosts, RoundCosts

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
