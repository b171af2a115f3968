"""Requests go to the engine that knows their beginning, else to the one with the least to do."""

import collections
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.scheduling.balancer import LONGEST_PAUSE, PAUSE, Balancer, Share

SYSTEM = list(range(32))


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_balancer(engines: int = 2, slack: int = 4, most: int | None = None) -> Balancer:
    return Balancer(engines, slack=slack, most_requests=most, block=8, known_blocks=64)


def clocked(engines: int) -> tuple[Balancer, Clock]:
    clock = Clock()
    return Balancer(engines, slack=4, block=8, known_blocks=64, clock=clock), clock


def prompt(seed: int, tokens: int = 32) -> list[int]:
    return random.Random(seed).choices(range(1000, 2000), k=tokens)


def place_all(balancer: Balancer, prompts: list[list[int]]) -> list[int]:
    return [balancer.place(one, 8).engine for one in prompts]


def test_new_prompts_go_to_the_fewest_requests_then_the_fewest_tokens():
    balancer = new_balancer(3)
    assert place_all(balancer, [prompt(0, 40), prompt(1, 8), prompt(2)]) == [0, 1, 2]
    assert balancer.place(prompt(3), 8).engine == 1  # all have one request; its prompt is short
    assert balancer.requests == [1, 2, 1] and balancer.tokens == [48, 56, 40]


def test_samples_count_as_requests():
    balancer = new_balancer()
    share = balancer.place(prompt(0), 8, requests=3)
    assert share == Share(0, 3, 32 + 24)
    assert place_all(balancer, [prompt(i) for i in range(1, 4)]) == [1, 1, 1]


def test_a_known_beginning_is_preferred_to_less_load():
    balancer = new_balancer()
    conversation = prompt(0)
    assert place_all(balancer, [conversation, prompt(1)]) == [0, 1]
    assert balancer.place([*conversation, *prompt(2)], 8).engine == 0
    # The longer beginning counts, and only whole blocks do.
    assert balancer.place([*conversation, *prompt(2, 16), *prompt(3)], 8).engine == 0
    assert balancer.place([*conversation[:7], *prompt(4)], 8).engine == 1


def test_a_beginning_after_other_tokens_or_with_another_salt_is_not_known():
    balancer = new_balancer()
    balancer.place(SYSTEM, 8)
    assert balancer.place([7, *SYSTEM], 8).engine == 1
    balancer = new_balancer()
    balancer.place(SYSTEM, 8, namespace="a")
    assert balancer.place(SYSTEM, 8, namespace="b").engine == 1
    assert balancer.place(SYSTEM, 8, namespace="a").engine == 0


def test_no_engine_is_crowded_with_a_beginning_that_all_share():
    balancer = new_balancer(slack=4)
    chosen = [balancer.place([*SYSTEM, *prompt(seed)], 8).engine for seed in range(20)]
    assert chosen[:6] == [0, 0, 0, 0, 0, 1]
    assert chosen.count(0) - chosen.count(1) in (0, 1)  # once both know it, they are even


def test_idle_engines_take_turns_so_that_all_caches_are_used():
    balancer = new_balancer()
    chosen = []
    for seed in range(4):
        share = balancer.place(prompt(seed), 8)
        balancer.end(share)
        chosen.append(share.engine)
    assert chosen == [0, 1, 0, 1]


def test_a_full_queue_is_avoided_while_another_has_room():
    balancer = new_balancer(slack=4, most=2)
    conversation = prompt(0)
    assert place_all(balancer, [conversation] * 5) == [0, 0, 1, 1, 0]  # the last one is refused
    balancer = new_balancer(slack=4, most=2)
    balancer.place(conversation, 8)
    assert balancer.place(conversation, 8, requests=2).engine == 1


def test_the_oldest_prompts_are_forgotten():
    def follow_up_after(other: list[int]) -> int:
        """The engine of a prompt that engine 0 knows, unless it has forgotten it."""
        balancer = Balancer(2, slack=9, block=8, known_blocks=8)
        first = balancer.place(prompt(0), 8)
        balancer.place(prompt(1), 8, requests=4)
        balancer.place(other, 8)
        balancer.end(first)
        balancer.place(prompt(2), 8, requests=6)
        assert balancer.requests == [7, 4]
        return balancer.place(prompt(0), 8).engine

    assert follow_up_after(prompt(0)) == 0
    assert follow_up_after(prompt(3, 200)) == 1  # a prompt may fill all


def test_without_a_cache_only_load_counts():
    balancer = Balancer(2, slack=4)
    assert place_all(balancer, [SYSTEM] * 4) == [0, 1, 0, 1]


# Engines that fail.


def serve(balancer: Balancer, broken: set[int], seed: int) -> int:
    """The engine of a request that ends at once."""
    share = balancer.place(prompt(seed), 8)
    balancer.end(share, works=share.engine not in broken)
    return share.engine


def test_an_engine_that_fails_is_tried_again_after_ever_longer_pauses():
    balancer, clock = clocked(2)
    tried = []
    for tick in range(4 * 400):  # four requests a second; engine 0 has the fewest of all, always
        if serve(balancer, {0}, tick) == 0:
            tried.append(clock.now - 1000)
        clock.now += 0.25
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert tried[0] == 0 and pauses[:9] == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert balancer.failures == [len(tried), 0]


def test_one_prompt_that_ends_well_brings_an_engine_back():
    balancer, clock = clocked(2)
    assert [serve(balancer, {0}, seed) for seed in range(4)] == [0, 1, 1, 1]
    clock.now += PAUSE
    trial = balancer.place(prompt(4), 8)
    assert trial.engine == 0
    assert place_all(balancer, [prompt(seed) for seed in range(5, 9)]) == [1, 1, 1, 1]
    balancer.end(trial, works=True)
    assert place_all(balancer, [prompt(seed) for seed in range(9, 13)]) == [0, 0, 0, 0]
    balancer.end(Share(0, 0, 0, failures=1), works=False)
    clock.now += PAUSE  # the row has begun anew
    assert balancer.place(prompt(13), 8).engine == 0


def test_a_long_or_cancelled_trial_does_not_keep_an_engine_out():
    balancer, clock = clocked(2)
    serve(balancer, {0}, 0)
    for seed in range(1, 4):  # none of them ends
        clock.now += PAUSE
        assert place_all(balancer, [prompt(10 * seed), prompt(10 * seed + 1)]) == [0, 1]
    trial = balancer.place(prompt(50), 8)
    balancer.end(trial)
    clock.now += PAUSE
    assert balancer.place(prompt(51), 8).engine == 0


def test_all_that_a_failure_interrupts_is_one_failure():
    balancer, clock = clocked(2)
    shares = [balancer.place(prompt(seed), 8) for seed in range(8)]
    for share in shares:
        balancer.end(share, works=share.engine != 0)
    assert balancer.failures == [1, 0]
    clock.now += PAUSE
    assert balancer.place(prompt(9), 8).engine == 0


def test_what_was_done_before_a_failure_does_not_bring_an_engine_back():
    balancer, _ = clocked(2)
    first, _, second = (balancer.place(prompt(seed), 8) for seed in range(3))
    assert first.engine == second.engine == 0
    balancer.end(first, works=False)
    balancer.end(second, works=True)
    assert balancer.place(prompt(3), 8).engine == 1


def test_an_engine_that_fails_has_lost_its_cache():
    balancer, clock = clocked(2)
    share = balancer.place(SYSTEM, 8)
    balancer.end(share, works=False)
    clock.now += PAUSE
    balancer.place(prompt(1), 8)
    assert balancer.place(SYSTEM, 8).engine == 1


def test_where_all_fail_those_that_failed_least_serve():
    balancer, clock = clocked(3)
    chosen = collections.Counter(serve(balancer, {0, 1, 2}, seed) for seed in range(30))
    assert set(chosen.values()) == {10}
    clock.now += LONGEST_PAUSE
    repaired = [serve(balancer, {0, 1}, 100 + seed) for seed in range(20)]
    assert repaired.count(2) == 18 and set(repaired[3:]) == {2}


@settings(max_examples=100, deadline=None)
@given(
    engines=st.integers(1, 4),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("place"), st.integers(0, 5)),
            st.tuples(st.just("end"), st.integers(0, 50), st.sampled_from([True, False, None])),
            st.tuples(st.just("wait"), st.floats(0.1, 100)),
        ),
        max_size=60,
    ),
)
def test_any_history(engines: int, steps: list[tuple]):
    """Loads are those of what is under way, and a failed engine has no turn before its time."""
    balancer, clock = clocked(engines)
    under_way: list[Share] = []
    in_a_row = [0] * engines  # failures
    rests = [0.0] * engines  # until when an engine that failed must have nothing

    def rest(engine: int) -> None:
        rests[engine] = clock.now + min(PAUSE * 2 ** (in_a_row[engine] - 1), LONGEST_PAUSE)

    for what, *values in steps:
        if what == "wait":
            clock.now += values[0]
        elif what == "end" and under_way:
            share, works = under_way.pop(values[0] % len(under_way)), values[1]
            before = balancer.failures[share.engine]
            balancer.end(share, works)
            if balancer.failures[share.engine] > before:
                assert works is False and share.failures == before
                in_a_row[share.engine] += 1
                rest(share.engine)
            elif works and share.failures == before:
                in_a_row[share.engine], rests[share.engine] = 0, 0.0
        elif what == "place":
            share = balancer.place(prompt(values[0]), 8)
            under_way.append(share)
            assert clock.now >= rests[share.engine] or all(clock.now < until for until in rests)
            if in_a_row[share.engine]:  # it gets one prompt in each such while
                rest(share.engine)
        for engine in range(engines):
            own = [share for share in under_way if share.engine == engine]
            assert balancer.requests[engine] == len(own)
            assert balancer.tokens[engine] == sum(share.tokens for share in own)
