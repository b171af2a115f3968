"""What the scheduler promises, one behaviour at a time."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.scheduling.plan import Limits, QueueFull, RowResult
from jaxspec.scheduling.preemption_costs import PreemptionCosts
from jaxspec.scheduling.shares import fair_shares
from tests.scheduling.fake_device import ENDLESS, Run

LIMITS = Limits(
    num_rows=4,
    num_pages=200,
    page_size=4,
    max_length=200,
    scratch_slots=3,
    tokens_per_round=3,
    prefill_budget=32,
    max_rounds=8,
    watermark=0.0,
)


def made(**changes: Any) -> Limits:
    return dataclasses.replace(LIMITS, **changes)


def prompt(length: int, first: int = 1) -> list[int]:
    """Prompts of different ``first`` share nothing."""
    return [first, *range(10, 9 + length)]


def long_texts(run: Run, count: int, max_tokens: int = 40, **options: Any) -> list[str]:
    """Add requests whose texts do not stop early."""
    first = 1000 * (1 + len(run.requests))
    return [
        run.add(prompt(5, first + index), max_tokens, payload=ENDLESS, **options)
        for index in range(count)
    ]


# Admission.


def test_smaller_priorities_go_first_then_earlier_arrivals():
    run = Run(made(num_rows=1))
    late, early = run.add([1], 1, arrival=5), run.add([2], 1, arrival=4)
    urgent = run.add([3], 1, arrival=9, priority=-1)
    run.finish()
    assert list(run.endings) == [urgent, early, late]


def test_what_can_never_fit_is_refused_at_once_with_the_numbers():
    run = Run(made(num_pages=20))
    with pytest.raises(
        ValueError,
        match=r"'r0': 90 tokens and a tree of 3 slots need 24 pages of 4, there are 20: shorten",
    ):
        run.add(prompt(60), max_tokens=30)
    assert run.scheduler.is_idle


def test_an_id_cannot_be_used_twice_at_a_time():
    run = Run(LIMITS)
    run.add([1])
    with pytest.raises(ValueError, match="'r0' is already here"):
        run.scheduler.add(run.requests["r0"])


def test_a_full_queue_says_so():
    run = Run(made(max_queue=2))
    run.add([1])
    run.add([2])
    with pytest.raises(QueueFull, match="2 requests wait, max_queue=2"):
        run.add([3])
    run.step()
    run.add([3])
    run.finish()


def test_the_watermark_stays_available_for_those_who_run():
    run = Run(made(num_pages=100, watermark=0.2))
    for first in range(4):
        run.add(prompt(100, first), max_tokens=4)
    run.step()
    assert run.scheduler.num_running == 2  # 27 pages each; a third would leave 19
    run.finish()


def test_the_head_of_the_queue_is_not_overtaken_while_it_lacks_pages():
    run = Run(made(num_pages=60))
    run.add(prompt(150), max_tokens=3)
    large, small = run.add(prompt(150, 2), max_tokens=3), run.add([3], max_tokens=1)
    run.finish()
    admitted = [new.sequence.request_id for plan in run.plans for new in plan.admissions]
    assert admitted.index(large) < admitted.index(small)


def test_shards_fill_evenly():
    run = Run(made(num_rows=8, shards=4, num_pages=60))
    for first in range(8):
        run.add(prompt(20, first))
    plan = run.step()
    assert sorted(new.sequence.row for new in plan.admissions) == list(range(8))
    assert {new.sequence.row // 2 for new in plan.admissions[:4]} == {0, 1, 2, 3}
    run.finish()


# Reading prompts.


def test_a_long_prompt_is_read_in_pieces_while_others_decode():
    run = Run(made(max_length=2000, num_pages=600))
    long_texts(run, 1, max_tokens=150)
    run.step()
    run.add(prompt(1000), max_tokens=2)
    for _ in range(1000 // 32):
        plan = run.step()
        assert sum(read.count for read in plan.reads) <= 32
        assert (len(plan.decode_rows), plan.rounds) == (1, 1)
    run.finish()


def test_readers_share_the_budget_and_short_prompts_do_not_wait_for_a_long_one():
    run = Run(made(prefix_caching=False))
    run.add(prompt(150))
    for first in (2, 3):
        run.add(prompt(5, first))
    plan = run.step()
    assert [read.count for read in plan.reads] == [22, 5, 5]
    assert not plan.decode_rows  # no row decoded before: the first tokens wait for no round
    plan = run.step()
    assert (len(plan.reads), len(plan.decode_rows)) == (1, 2)
    run.finish()


def test_rows_that_decode_do_not_wait_for_those_that_read():
    run = Run(made(prefix_caching=False))
    run.add(prompt(5))
    run.step()
    run.step()
    run.add(prompt(5, 2))
    plan = run.step()
    assert (len(plan.reads), len(plan.decode_rows), plan.rounds) == (1, 2, 1)
    run.finish()


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(12, 200))
@settings(deadline=None)
def test_fair_shares(wanted: list[int], budget: int):
    shares = fair_shares(wanted, budget)
    assert sum(shares) == min(sum(wanted), budget) or sum(shares) > budget - len(wanted)
    assert sum(shares) <= budget
    for share, want in zip(shares, wanted, strict=True):
        assert 1 <= share <= want
        assert share == want or all(other <= share + 1 for other in shares)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(12, 90), st.integers(2, 30)
)
@settings(deadline=None)
def test_shares_are_not_cut_to_shreds(wanted: list[int], budget: int, least: int):
    shares = fair_shares(wanted, budget, least)
    assert sum(shares) == min(sum(wanted), budget) or sum(shares) > budget - len(wanted)
    assert shares[0] >= min(wanted[0], least, budget), "the first always comes on"
    small = [share for share, want in zip(shares, wanted, strict=True) if share < min(want, least)]
    assert all(share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(share > 0 for share in small) <= 1, "what is left of the budget, if not nothing"


def test_short_prompts_are_read_first_where_a_plan_reads_one_of_them():
    run = Run(made(num_rows=6, num_pages=99, prefill_budget=8, least_read=8, prefix_caching=False))
    long, *short = [run.add(prompt(size, size), max_tokens=2) for size in (80, 5, 6, 7, 8)]
    plans = [run.step() for _ in range(7)]
    read = [{plan.sequences[each.row].request_id for each in plan.reads} for plan in plans]
    assert set(short) <= set().union(*read), "26 tokens, and two parts of the long one"
    assert long in set().union(*read[:4]), "it comes on meanwhile"
    run.finish()
    assert list(run.endings)[-1] == long


def test_a_long_prompt_comes_through_beside_an_endless_stream_of_short_ones():
    run = Run(made(num_rows=2, num_pages=60, prefill_budget=8))
    long = run.add(prompt(100, 2), max_tokens=20)
    steps = 0
    while long not in run.endings:
        while run.scheduler.num_waiting < 3:
            run.add(prompt(6, 1000 + len(run.requests)), max_tokens=2)
        run.step(lag=1)
        steps += 1
    assert steps < 60  # alone: 13 to read it, at most 20 to decode
    assert len(run.endings) > 5
    run.finish()


# Rounds of a call.


def test_rounds_grow_while_nothing_waits_and_fall_back_for_a_newcomer():
    run = Run(made(max_length=400, num_pages=400, tokens_per_round=1))
    long_texts(run, 1, max_tokens=60)
    assert [run.step().rounds for _ in range(6)] == [0, 1, 2, 4, 8, 8]
    run.add(prompt(40, 3), max_tokens=30)
    assert [run.step().rounds for _ in range(4)] == [1, 1, 1, 2]
    run.finish()


def test_calls_are_short_while_a_request_waits_for_a_row():
    run = Run(made(num_rows=1))
    (first,) = long_texts(run, 1)
    run.add([2])
    run.step()
    while first not in run.endings:
        assert run.step().rounds <= 1
    run.finish()


def test_rounds_are_no_more_than_the_pages_allow():
    run = Run(made(num_pages=14, max_length=50))
    long_texts(run, 1, max_tokens=45)
    run.finish()
    assert run.scheduler.preemptions == {"recompute": 0, "swap": 0}
    assert max(plan.rounds for plan in run.plans) > 1


def test_no_call_is_planned_for_a_row_that_is_surely_done():
    run = Run(LIMITS)
    run.add(prompt(5), max_tokens=1)
    assert run.step(lag=1).decode_rows == []
    assert not run.step(lag=1).runs_model
    run.finish()


# Ends.


def test_deadlines_end_waiting_and_running_requests():
    run = Run(made(num_rows=1))
    (first,) = long_texts(run, 1, max_tokens=100, deadline=4.0)
    waiting = run.add([3], deadline=2.0)
    in_time = run.add([4], deadline=1000.0)
    for _ in range(4):
        run.step(lag=1)
    assert run.endings == {waiting: "timeout", first: "timeout"}
    run.finish()
    assert run.endings[in_time] in ("stop", "length")


def test_updates_come_in_the_order_of_plans_and_within_their_bounds():
    run = Run(LIMITS)
    run.add(prompt(5), max_tokens=30)
    plan = run.scheduler.plan(0)
    later = run.scheduler.plan(0)
    with pytest.raises(ValueError, match="plan 1 is updated, but the next one is 0"):
        run.scheduler.update(later, [])
    with pytest.raises(ValueError, match="row 0 emitted 2 tokens, planned were at most 1"):
        run.scheduler.update(plan, [RowResult(0, (1, 2))])
    with pytest.raises(ValueError, match="row 3 emitted 1 tokens, planned were at most 0"):
        run.scheduler.update(plan, [RowResult(3, (1,))])
    assert run.scheduler.update(plan, [RowResult(0, (1,))])[0].tokens == (1,)
    assert run.scheduler.update(later, [RowResult(0, (1, 2))])[0].tokens == (1, 2)


def test_a_failed_row_ends_and_the_prefix_cache_learns_nothing_more_of_it():
    run = Run(LIMITS)
    name = run.add(prompt(20), max_tokens=30)
    plan = run.scheduler.plan(0)
    run.scheduler.update(plan, [RowResult(0, (1,))])
    plan = run.scheduler.plan(0)
    run.scheduler.update(plan, [RowResult(0, (2, 3, 4), pending=3)])  # 5 pages settled
    later = run.scheduler.plan(0)
    run.scheduler.update(later, [RowResult(0, (5, 6), pending=2)])  # of 25 tokens 23 settled
    last = run.scheduler.plan(0)
    result = RowResult(0, (), pending=0, ended="not finite", failed=True)
    (delivery,) = run.scheduler.update(last, [result])
    assert (delivery.request_id, delivery.ended) == (name, "not finite")
    assert run.scheduler.plan(0).catch_up == []
    assert run.scheduler.is_idle
    assert run.scheduler.usage().idle == 5


# The prefix cache.


@pytest.mark.parametrize(
    ("length", "read_again", "count"), [(22, 1, 3), (22, 3, 5), (22, 30, 22), (20, 1, 1)]
)
def test_a_second_request_finds_the_whole_pages_of_the_first(
    length: int, read_again: int, count: int
):
    """The last cached tokens are read once more."""
    run = Run(made(prefix_tokens_read_again=read_again))
    run.add(prompt(length), max_tokens=1)
    run.finish()
    run.add(prompt(length), max_tokens=1)
    plan = run.step()
    assert plan.admissions[0].cached == 20
    assert [read.count for read in plan.reads] == [count]
    run.finish()
    assert run.scheduler.cache_statistics() == (2 * length, 20)


def test_generated_tokens_are_found_too_equally_many_with_and_without_a_drafter():
    hits = []
    for has_drafter in (False, True):
        for seed in range(8):
            run = Run(LIMITS, seed=seed, has_drafter=has_drafter)
            (name,) = long_texts(run, 1, max_tokens=30)
            run.finish(lag=1)
            run.add([*run.requests[name].prompt, *run.texts[name], 7], max_tokens=1)
            run.finish()
            hits.append(run.scheduler.cache_statistics()[1])
    assert set(hits) == {32}  # of 35 tokens; the last of them has no KV


def test_without_the_prefix_cache_nothing_is_found():
    run = Run(made(prefix_caching=False))
    for _ in range(2):
        run.add(prompt(22), max_tokens=1)
        run.finish()
    assert run.scheduler.cache_statistics() == (44, 0)
    assert run.scheduler.usage().free == LIMITS.num_pages


def test_salts_share_nothing():
    run = Run(LIMITS)
    for options in ({}, {"cache_salt": "mine"}, {"cache_salt": "other"}):
        run.add(prompt(22), max_tokens=1, **options)
        run.finish()
    assert run.scheduler.cache_statistics() == (66, 0)


def test_requests_that_come_together_read_a_common_beginning_once():
    run = Run(made(num_rows=8, max_length=300, num_pages=400))
    for own in range(8):
        run.add([*prompt(100), 500 + own], max_tokens=4)
    run.add(prompt(9, 2), max_tokens=1)  # has another prompt, and does not wait
    assert len(run.step(lag=1).admissions) == 2
    assert (run.scheduler.num_waiting, run.scheduler.num_deferred) == (7, 7)
    run.cancel("r7")
    assert (run.scheduler.num_waiting, run.scheduler.num_deferred) == (6, 6)
    run.add([*prompt(100), 600], max_tokens=4)
    assert (run.scheduler.num_waiting, run.scheduler.num_deferred) == (7, 6)
    run.finish(lag=1)
    assert run.scheduler.num_deferred == 0
    assert run.scheduler.cache_statistics() == (8 * 101 + 9, 7 * 100)


def test_old_pages_are_given_out_when_they_are_needed():
    run = Run(made(num_pages=30))
    for first in range(6):
        run.add(prompt(40, first), max_tokens=1)
        run.finish()
    assert run.scheduler.usage().idle > 10
    assert run.scheduler.preemptions == {"recompute": 0, "swap": 0}


# Samples of one prompt.


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [3, 21, 24])
def test_samples_share_the_pages_of_their_prompt(length: int, prefix_caching: bool):
    run = Run(made(prefix_caching=prefix_caching, prefill_budget=8))
    long_prompt = prompt(length)
    for _ in range(3):
        run.add(long_prompt, max_tokens=12, group="g")
    while len(run.plans) == 0 or run.scheduler.num_running != 3:
        plan = run.step(lag=1)
    assert [new.cached for new in plan.admissions] == [length, length]
    assert [read.count for read in plan.reads] == [1, 1]
    assert len(plan.copies) == (2 if length % 4 else 0)
    first, *others = run.scheduler.shards[0].running
    for other in others:
        assert other.pages[: length // 4] == first.pages[: length // 4]
        assert set(other.pages[length // 4 :]).isdisjoint(first.pages[length // 4 :])
    run.finish(lag=1)


def test_samples_share_nothing_where_rows_keep_what_is_in_no_page():
    run = Run(made(prefix_caching=False, share_pages=False))
    for _ in range(3):
        run.add(prompt(21), max_tokens=12, group="g")
    run.finish(lag=1)
    assert [new.cached for plan in run.plans for new in plan.admissions] == [0, 0, 0]
    assert not any(plan.copies for plan in run.plans)


def test_a_sample_whose_sibling_is_gone_reads_the_prompt_itself():
    run = Run(made(num_rows=1, prefix_caching=False))
    names = [run.add(prompt(9), max_tokens=3, group="g") for _ in range(2)]
    run.finish(lag=1)
    assert set(run.endings) == set(names)
    assert [new.cached for plan in run.plans for new in plan.admissions] == [0, 0]


# Preemption.


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_preempted_requests_go_on_with_the_same_text(kind: str, lag: int):
    run = Run(made(num_pages=30, preemption=kind))
    names = long_texts(run, 4, max_tokens=40)
    run.finish(lag)
    other = "swap" if kind == "recompute" else "recompute"
    assert run.scheduler.preemptions[kind] > 0
    assert run.scheduler.preemptions[other] == 0
    assert next(iter(run.endings)) == names[0]  # the first to come is never the one that goes


def test_the_worst_priority_goes_first():
    run = Run(made(num_pages=30, preemption="recompute"))
    (low,) = long_texts(run, 1, max_tokens=40, priority=1)
    long_texts(run, 3, max_tokens=40)
    out = None
    while out is None:
        before = {s.row: s.request_id for s in run.scheduler.shards[0].running}
        plan = run.step()
        if run.scheduler.preemptions["recompute"]:
            out = before[plan.release[0]]
    assert out == low
    run.finish()


def costs_of(token: float, part: float) -> PreemptionCosts:
    costs = PreemptionCosts()
    costs.add_reading(10, 10 * token)
    costs.add_swap(2, 2 * part)
    return costs


@pytest.mark.parametrize(
    ("costs", "kind"),
    [
        (costs_of(1.0, 0.1), "swap"),
        (costs_of(1.0, 100.0), "recompute"),
        (PreemptionCosts(), "swap"),  # while nothing is known
    ],
)
def test_the_cheaper_preemption_is_taken(costs: PreemptionCosts, kind: str):
    run = Run(made(num_pages=30), costs=costs)
    long_texts(run, 4, max_tokens=40)
    run.finish()
    assert [name for name, count in run.scheduler.preemptions.items() if count] == [kind]


# With 30 pages, sequences of 45 tokens, 12 pages each, are preempted.


@pytest.mark.parametrize(("host_parts", "together"), [(0, 2), (6, 3), (9, 4), (None, 4)])
def test_no_more_run_than_can_be_swapped_where_nobody_is_recomputed(
    host_parts: int | None, together: int
):
    """Two fit 30 pages to their ends. A third needs room for all but one: 2 times 3 parts."""
    limits = made(num_pages=30, preemption="swap", part_pages=4, host_parts=host_parts)
    run = Run(dataclasses.replace(limits, swaps_only=True))
    long_texts(run, 8, max_tokens=40)
    most = 0
    while not run.scheduler.is_idle:
        run.step(lag=1)
        in_host = len(run.device.host)
        most = max(most, run.scheduler.num_running + in_host)
    run.check()
    assert most == together
    assert run.scheduler.preemptions["recompute"] == 0
    assert (run.scheduler.preemptions["swap"] > 0) == (together > 2)


def test_a_row_that_reads_is_always_recomputed():
    run = Run(made(num_pages=24, preemption="swap", prefill_budget=4))
    long_texts(run, 1, max_tokens=80)
    for _ in range(4):
        run.step()
    run.add(prompt(60, 2), max_tokens=2)
    run.finish()
    assert run.scheduler.preemptions["recompute"] > 0


def test_pages_for_many_rounds_are_taken_back_before_anybody_goes():
    run = Run(made(num_pages=40, max_length=150))
    (first,) = long_texts(run, 1, max_tokens=100)
    for _ in range(6):
        run.step(lag=1)
    held = run.scheduler.usage()
    assert held.lookahead > 5
    run.add(prompt(60, 2), max_tokens=1)
    run.step(lag=1)
    assert run.scheduler.num_running == 2
    assert run.scheduler.preemptions == {"recompute": 0, "swap": 0}
    run.finish(lag=1)


def test_a_swapped_request_that_is_cancelled_is_dropped():
    run = Run(made(num_pages=30, preemption="swap"))
    names = long_texts(run, 4, max_tokens=40)
    while not run.device.host:
        run.step(lag=1)
    (swapped,) = run.device.host
    run.cancel(swapped)
    assert run.step(lag=1).dropped == [swapped]
    run.finish(lag=1)
    assert [run.endings[name] for name in names].count("cancelled") == 1


@pytest.mark.parametrize("share_generated", [False, True])
def test_pages_with_generated_tokens_are_shared_unless_that_is_off(share_generated):
    run = Run(made(share_generated=share_generated))
    for number in (1, 2):  # two texts after one prompt
        run.add(prompt(9), max_tokens=40, payload=ENDLESS)
        run.finish(lag=1)
        assert len(run.scheduler.shards[0].cache) == 2 + 10 * number * share_generated
    assert run.scheduler.cache_statistics()[1] == 8


def test_swapped_sequences_share_their_prompts_alone_where_generated_pages_are_not_shared():
    run = Run(made(num_pages=30, preemption="swap", share_generated=False))
    long_texts(run, 4, max_tokens=40)
    run.finish(lag=1)
    assert run.scheduler.preemptions["swap"] > 0
    cached = len(run.scheduler.shards[0].cache)
    assert 0 < cached <= 4  # a page of each prompt, if it was not evicted


def test_a_row_reads_no_more_than_its_program_can():
    run = Run(made(largest_read=5))
    run.add(prompt(23), max_tokens=3)
    run.finish(lag=1)
    counts = [read.count for plan in run.plans for read in plan.reads]
    assert counts == [5, 5, 5, 5, 3]


# Statistics.


def test_waste_of_running_requests_leaves_out_what_trees_need():
    run = Run(made(num_rows=3, page_size=16, max_length=300, prefill_budget=1000, scratch_slots=60))
    for length, first in ((60, 1), (200, 2), (35, 3)):
        run.add(prompt(length, first), max_tokens=50)
    run.scheduler.plan(0)
    usage = run.scheduler.usage()
    assert usage.waste <= 0.08
    assert (usage.context, usage.tokens) == (20, 295)
    assert usage.lookahead >= 3 * 60 // 16


@pytest.mark.parametrize("lag", [0, 1])
def test_few_rounds_are_wasted_where_a_call_runs_all_its_rounds(lag: int):
    limits = made(runs_all_rounds=True, max_rounds=64, max_length=1000, num_pages=600)
    run = Run(limits)
    run.add([1], 600, payload=ENDLESS)
    run.finish(lag)
    assert sum(plan.rounds for plan in run.plans) <= 1.1 * 600 / 2  # a round gives 2 on average
    assert len(run.plans) < 30


def test_calls_are_short_until_most_rows_have_shown_a_round():
    run = Run(made(runs_all_rounds=True, max_rounds=8, unseen_rounds=1))
    for first in range(3):
        run.add(prompt(5, first), max_tokens=60)
    plans = [run.step(lag=1) for _ in range(5)]
    # Reads; a round; another, planned before the first was seen; then long calls.
    assert [plan.rounds for plan in plans] == [0, 1, 1, 8, 8]
    run.add(prompt(5, 3), max_tokens=60)
    run.step(lag=1)
    assert run.step(lag=1).rounds > 1  # one of four is new
    run.finish()


@pytest.mark.parametrize(("runs_all", "rounds"), [(True, 8), (False, 3)])
def test_calls_of_a_crowd_are_not_short_while_others_wait(runs_all: bool, rounds: int):
    """Else the device would wait for the host, which needs longer for more rows."""
    limits = {"num_rows": 4, "max_rounds": 8, "runs_all_rounds": runs_all, "prefix_caching": False}
    for crowded, expected in ((2, rounds), (5, 1), (None, 1)):
        run = Run(made(**limits, crowded_rows=crowded))
        for first in range(6):
            run.add(prompt(5, first), max_tokens=60)
        run.step()
        plan = run.step()
        assert len(plan.decode_rows) == 4 and run.scheduler.num_waiting == 2
        assert plan.rounds == expected
        run.finish()
