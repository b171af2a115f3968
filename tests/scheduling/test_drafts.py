"""Old texts as drafts of requests: which plans verify how much of them."""

import dataclasses

import pytest

from jaxspec.scheduling.plan import Limits, Plan
from jaxspec.scheduling.sequence import Request, Sequence, State
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
    """Add a request whose text does not stop early, with that as its draft."""
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


def verifying_rows(*shards: list[int], in_flight: int) -> list[int]:
    """Rows that verify next, of shards that have these rows; the row ``in_flight`` does so now."""
    found = []
    for shard in shards:
        request = Request("", (1, 2), 50, arrival=0.0, draft=(3,) * 40)
        read = {"tokens": [1, 2], "state": State.READING, "goal": 2, "read": 1}
        found.append([Sequence(request, row, 60, row=row, **read) for row in shard])
        for sequence in found[-1]:
            sequence.verifying = sequence.row == in_flight
    plan = Plan(0)
    plan.add_verifies(found, dataclasses.replace(LIMITS, verified_rows=2))
    return [each.row for each in plan.verifies]


def test_no_shard_waits_for_full_calls_of_another():
    assert verifying_rows([0, 1, 2, 3], [5], in_flight=3) == [0, 1, 5]
    assert verifying_rows([0, 3], [5], in_flight=3) == []  # the next call has the rows of both
    assert verifying_rows([0, 3], [5], in_flight=-1) == [0, 3, 5]


def test_a_sample_without_a_draft_shares_the_prompt_of_one_that_verifies():
    run = Run(LIMITS)
    add_drafted(run, list(range(1, 11)), 50, group="g")
    run.add(range(1, 11), 50, payload=ENDLESS, group="g")
    run.finish(lag=1)
    assert [new.cached for plan in run.plans for new in plan.admissions] == [0, 9]
