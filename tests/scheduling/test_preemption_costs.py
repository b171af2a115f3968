"""What preemption costs, as it is learnt from measurements."""

import pytest

from jaxspec.scheduling.preemption_costs import PreemptionCosts


def test_nothing_is_known_at_first_and_swapping_is_taken():
    costs = PreemptionCosts()
    assert costs.recompute_token is None and costs.swap_part is None
    assert costs.swap_is_cheaper(tokens=1, parts=100)
    costs.add_swap(1, 5.0)
    assert costs.swap_is_cheaper(tokens=1, parts=100)


@pytest.mark.parametrize(("tokens", "swaps"), [(199, False), (201, True)])
def test_parts_are_weighed_against_tokens(tokens: int, swaps: bool):
    costs = PreemptionCosts()
    costs.add_reading(tokens=100, seconds=1.0)
    costs.add_swap(parts=3, seconds=3.0)
    assert (costs.recompute_token, costs.swap_part) == (0.01, 1.0)
    assert costs.swap_is_cheaper(tokens, parts=2) == swaps


def test_the_rounds_of_a_plan_are_not_counted_as_reading():
    costs = PreemptionCosts()
    costs.add_call(tokens=10, rounds=1, seconds=7.0)  # who knows what the round took
    assert costs.recompute_token is None
    costs.add_call(tokens=0, rounds=4, seconds=8.0)
    costs.add_call(tokens=10, rounds=1, seconds=7.0)
    assert costs.recompute_token == pytest.approx(0.5)
    costs.add_call(tokens=0, rounds=0, seconds=9.0)  # it only moved rows
    costs.add_call(tokens=10, rounds=0, seconds=5.0)
    assert costs.recompute_token == pytest.approx(0.5)


def test_noise_makes_no_cost_negative():
    costs = PreemptionCosts()
    costs.add_call(tokens=0, rounds=1, seconds=9.0)
    costs.add_call(tokens=10, rounds=1, seconds=1.0)
    assert costs.recompute_token is None
    costs.add_reading(10, 1.0)
    assert costs.recompute_token is not None and costs.recompute_token > 0


def test_old_measurements_are_forgotten():
    costs = PreemptionCosts()
    for seconds in [1.0] * 50 + [3.0] * 500:
        costs.add_reading(1, seconds)
    assert costs.recompute_token == pytest.approx(3.0, rel=0.01)
