"""Requests go to the engine that knows their beginning, else to the one with the least to do."""

import random

from jaxspec.scheduling.balancer import Balancer, Share

SYSTEM = list(range(32))


def new_balancer(engines: int = 2, slack: int = 4, most: int | None = None) -> Balancer:
    return Balancer(engines, slack=slack, most_requests=most, block=8, known_blocks=64)


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


def test_work_that_ended_counts_no_more():
    balancer = new_balancer()
    first = balancer.place(prompt(0), 8)
    balancer.place(prompt(1), 8)
    balancer.end(first)
    assert balancer.requests == [0, 1] and balancer.tokens == [0, 40]
    assert balancer.place(prompt(2), 8).engine == 0


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
