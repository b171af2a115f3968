"""Old texts as drafts of requests: which plans verify how much of them."""

import dataclasses

import pytest

from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.sequence import Request
from tests.scheduling.fake_device import ENDLESS, Run, text_alone

LIMITS = Limits(
    num_rows=6,
    num_pages=200,
    page_size=4,
    max_length=200,
    scratch_slots=3,
    tokens_per_round=3,
    prefill_budget=16,
    largest_verified=20,
    watermark=0.0,
)


def add_drafted(run: Run, prompt: list[int], tokens: int, group: str | None = None) -> None:
    """A request whose text does not stop early, with that as its draft."""
    request = Request(f"r{len(run.requests)}", tuple(prompt), tokens, arrival=0.0, payload=ENDLESS)
    text, _ = text_alone(request, LIMITS.max_length)
    run.add(prompt, tokens, payload=ENDLESS, group=group, draft=tuple(text))


def verified(run: Run) -> list[list[int]]:
    """Tokens of the rows of each plan that verifies."""
    return [[each.count for each in plan.verifies] for plan in run.plans if plan.verifies]


@pytest.mark.parametrize("lag", [0, 1])
def test_each_row_verifies_as_much_as_a_call_computes(lag: int):
    run = Run(LIMITS)
    for first in range(6):
        add_drafted(run, [first + 1, 7, 8], 50)
    run.finish(lag)
    assert verified(run) == [[20] * 6, [20] * 6, [10] * 6]


def test_calls_are_full_and_the_longest_drafts_come_first():
    run = Run(dataclasses.replace(LIMITS, verified_rows=2))
    for first, tokens in enumerate((10, 30, 50, 70)):
        add_drafted(run, [first + 1, 7, 8], tokens)
    run.finish(lag=1)
    assert verified(run) == [[10, 20], [20, 20], [10, 20], [20, 20], [10, 10]]


@pytest.mark.parametrize("length", [9, 12])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_of_a_prompt_do_not_wait_for_the_drafts_of_others(
    length: int, prefix_caching: bool
):
    run = Run(LIMITS)
    for _ in range(5):
        add_drafted(run, list(range(1, 1 + length)), 50, group="g")
    run.finish(lag=1)
    assert sum(bool(plan.admissions) for plan in run.plans) == 2
    assert verified(run) == [[20], [20] * 5, [10] + [20] * 4, [10] * 4]
