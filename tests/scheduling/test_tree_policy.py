"""The policy that chooses draft trees, on a simulated H100 (see adaptive_simulation)."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.scheduling.round_costs import RoundCosts
from jaxspec.scheduling.tree_policy import TreePolicy
from tests.helpers.marks import slow
from tests.scheduling.adaptive_simulation import (
    CHAINS,
    MIXED,
    SHAPES,
    TREE,
    Phase,
    cut,
    draw_accepted,
    h100_costs,
    overall,
    simulate,
    steady,
)

CHAIN = TreeShape.parse("chain:3")


# Costs.


def test_costs_between_measured_points_lie_on_a_line():
    costs = RoundCosts({(1, PLAIN): 1.0, (8, PLAIN): 2.0, (32, PLAIN): 5.0})
    assert costs.seconds(8, PLAIN) == 2
    assert costs.seconds(16, PLAIN) == 3
    assert costs.seconds(9, PLAIN) == costs.seconds(16, PLAIN)  # programs are padded
    assert costs.seconds(64, PLAIN) == 9  # the last line goes on


def test_noise_never_makes_more_rows_cheaper():
    costs = RoundCosts({(1, PLAIN): 2.0, (2, PLAIN): 1.9, (4, PLAIN): 3.0, (8, PLAIN): 2.9})
    times = [costs.seconds(rows, PLAIN) for rows in range(1, 20)]
    assert times == sorted(times)


def test_one_point_grows_in_proportion():
    costs = RoundCosts({(4, PLAIN): 1.0})
    assert [costs.seconds(rows, PLAIN) for rows in (1, 4, 8)] == [1, 1, 2]


def test_costs_know_their_shapes():
    assert h100_costs().shapes == (PLAIN, *CHAINS, TREE)
    with pytest.raises(KeyError):
        h100_costs().seconds(1, TreeShape(9, 4, 3))


# Choices.


def test_a_little_better_is_not_enough_to_change():
    costs = RoundCosts({(1, PLAIN): 1.0, (1, CHAIN): 1.0})
    ones = np.ones((200, 1), int)
    for hysteresis, chosen in ((0.2, PLAIN), (0.0, CHAIN)):
        policy = TreePolicy([PLAIN, CHAIN], hysteresis=hysteresis, exploration=0)
        policy.shape = PLAIN
        policy.estimate.observe(["a"], CHAIN, 0 * ones, ones)  # so its survival is near 0
        assert policy.choose(["a"], costs) == chosen


def test_without_exploration_only_the_best_is_chosen():
    policy = TreePolicy(SHAPES, exploration=0)
    ones = np.ones((200, 64), int)
    rows = list(range(64))
    policy.estimate.observe(rows, CHAINS[-1], 0 * ones, ones)
    assert {policy.choose(rows, h100_costs(), rounds=8) for _ in range(200)} == {PLAIN}


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_exploration_keeps_to_its_budget_even_if_nothing_is_ever_accepted(rows: int):
    policy, costs, keys = TreePolicy(SHAPES), h100_costs(), list(range(rows))
    spent = total = 0.0
    explored = 0
    for _ in range(1000):
        rounds = min(8, policy.most_rounds or 8)
        shape = policy.choose(keys, costs, rounds=rounds)
        seconds = rounds * costs.seconds(rows, shape)
        total += seconds
        spent += seconds - rounds * costs.seconds(rows, PLAIN)
        explored += shape != PLAIN
        policy.estimate.observe(keys, shape, np.zeros((rounds, rows)), np.ones((rounds, rows), int))
    assert explored > 3
    assert spent / total < 0.02


def test_a_row_that_decodes_plainly_learns_that_drafting_pays_again():
    policy = TreePolicy(SHAPES)
    simulate(policy, [Phase(64, (0.05,), 40_000)])
    assert policy.shape == PLAIN
    random, keys, seconds, costs = np.random.default_rng(0), list(range(64)), 0.0, h100_costs()
    while policy.shape == PLAIN:
        rounds = min(8, policy.most_rounds or 8)
        shape = policy.choose(keys, costs, rounds=rounds)
        accepted = draw_accepted(random, np.full(64, 0.9), shape, rounds)
        policy.estimate.observe(keys, shape, accepted, accepted + 1)
        seconds += rounds * costs.seconds(64, shape)
        assert seconds < 10
    assert policy.shape in SHAPES[1:]


def after_a_crowd_of_hard_texts() -> TreePolicy:
    """It decodes plainly, and has done so for a while."""
    policy, costs, keys = TreePolicy(SHAPES), h100_costs(), list(range(128))
    for _ in range(60):
        shape = policy.choose(keys, costs, rounds=8)
        policy.estimate.observe(keys, shape, np.zeros((8, 128)), np.ones((8, 128), int))
    assert policy.shape == PLAIN
    return policy


def test_a_new_crowd_drafts_first_though_the_one_before_accepted_nothing():
    policy, costs, random = after_a_crowd_of_hard_texts(), h100_costs(), np.random.default_rng(0)
    keys, shapes = list(range(128, 256)), []
    for _ in range(6):
        shapes.append(policy.choose(keys, costs, rounds=1))
        accepted = draw_accepted(random, np.full(128, 0.85), shapes[-1], 1)
        policy.estimate.observe(keys, shapes[-1], accepted, accepted + 1)
    assert PLAIN not in shapes
    assert shapes[0] == CHAINS[0] and shapes[-1].num_nodes > CHAINS[0].num_nodes


def test_new_crowds_again_and_again_cost_little_if_they_accept_nothing():
    """As requests of one round each would be."""
    policy, costs = after_a_crowd_of_hard_texts(), h100_costs()
    spent = total = 0.0
    for crowd in range(1, 2000):
        keys = list(range(128 * crowd, 128 * (crowd + 1)))
        shape = policy.choose(keys, costs, rounds=1)
        total += costs.seconds(128, shape)
        spent += costs.seconds(128, shape) - costs.seconds(128, PLAIN)
        policy.estimate.observe(keys, shape, np.zeros((1, 128)), np.ones((1, 128), int))
        for key in keys:
            policy.estimate.forget(key)
    assert 0 < spent / total < 0.025


def test_calls_are_short_until_something_is_known():
    policy = TreePolicy([PLAIN, CHAIN])
    costs = RoundCosts({(1, PLAIN): 1.0, (1, CHAIN): 1.1})
    assert policy.choose(["a"], costs) == CHAIN
    assert policy.most_rounds is not None
    ones = np.ones((100, 1), int)
    policy.estimate.observe(["a"], CHAIN, 3 * ones, 4 * ones)
    policy.choose(["a"], costs)
    assert policy.most_rounds is None


def test_what_is_clearly_worse_is_not_tried_for_long():
    """The tree of 60 is new, but what chains accept, and its first rounds, speak against it."""
    policy, costs, random = (
        TreePolicy([PLAIN, CHAIN, TREE]),
        h100_costs(),
        np.random.default_rng(0),
    )
    tried = 0
    for _ in range(40):
        shape = policy.choose(["a"], costs, rounds=4)
        accepted = draw_accepted(random, np.array([0.2]), shape, 4)
        policy.estimate.observe(["a"], shape, accepted, accepted + 1)
        tried += 4 * (shape == TREE)
    assert tried < 32


def test_what_may_be_the_best_is_tried_at_once():
    policy, costs, random = (
        TreePolicy([PLAIN, CHAIN, TREE]),
        h100_costs(),
        np.random.default_rng(0),
    )
    shapes = []
    for _ in range(12):
        shapes.append(policy.choose(["a"], costs, rounds=4))
        accepted = draw_accepted(random, np.array([0.85]), shapes[-1], 4)
        policy.estimate.observe(["a"], shapes[-1], accepted, accepted + 1)
    assert shapes[6:] == [TREE] * 6


def test_a_new_policy_loses_little_on_short_texts_where_drafting_does_not_pay():
    """Costs are those of a small model on a CPU; the chain of 7 is tried first."""
    seconds = dict(zip(SHAPES, (0.0235, 0.0315, 0.0415, 0.049, 0.056, 0.2), strict=True))
    costs = RoundCosts({(1, shape): each for shape, each in seconds.items()})
    tokens = spent = 0.0
    for seed in range(8):
        policy, random = TreePolicy((PLAIN, *CHAINS), hysteresis=0.03), np.random.default_rng(seed)
        for text in range(6):
            room, late = 48, None
            while room > 0:
                rounds = min(8, policy.most_rounds or 8)
                shape = policy.choose([text], costs, rounds=rounds)
                accepted = draw_accepted(random, np.array([0.1]), shape, rounds)
                committed = cut(accepted, np.array([room]))
                room -= int(committed.sum())
                tokens += committed.sum()
                spent += np.count_nonzero(committed) * costs.seconds(1, shape)
                if late is not None:
                    policy.estimate.observe(*late)
                late = [text], shape, accepted, committed
            policy.estimate.forget(text)
    assert tokens / spent > 0.93 / costs.seconds(1, PLAIN)


CHAT, CODE = 0.28, 0.85  # chance to accept the next token, of texts of SmolLM2 on a CPU
CPU_COSTS = RoundCosts({(1, PLAIN): 1.0, (1, CHAIN): 1.85})


def texts_in_turn(policy: TreePolicy, levels: list[float], tokens: int, seed: int) -> list[float]:
    """Speeds, as multiples of plain decoding's, of texts of so many tokens, one after the other.

    Each call is observed one late. The drafter hears 8 tokens at first, then 16 at a time.
    """
    random, speeds, late = np.random.default_rng(seed), [], None
    for text, level in enumerate(levels):
        room, spent, count, pending, heard = tokens, 0.0, 1, 1, np.zeros(2)
        while room > 0:
            rounds = min(count, policy.most_rounds or 32, room)
            shape = policy.choose([text], CPU_COSTS, rounds=rounds, ready={PLAIN: 1, CHAIN: 1})
            accepted = draw_accepted(random, np.array([level]), shape, rounds)
            committed = cut(accepted, np.array([room]))
            for _ in range(rounds if shape.is_plain else 0):
                if pending >= (16 if heard[0] else 8):
                    heard += pending - 1, random.binomial(pending - 1, level)
                    pending = 1
                pending += 1
            spent += np.count_nonzero(committed) * CPU_COSTS.seconds(1, shape)
            room, count = room - int(committed.sum()), min(2 * count, 32)
            if late is not None and late[0] == [text]:
                policy.estimate.hear(late[0], late[1][None])
                if not late[2].is_plain:
                    policy.estimate.observe(late[0], *late[2:])
            late = [text], heard.copy(), shape, accepted, committed
        policy.estimate.forget(text)
        speeds.append(tokens / spent)
    return speeds


def test_short_chats_lose_next_to_nothing_where_the_drafter_listens():
    def means(levels: list[float], tokens: int) -> np.ndarray:
        runs = []
        for seed in range(12):
            policy = TreePolicy((PLAIN, CHAIN), hysteresis=0.03, listens=True)
            runs.append(texts_in_turn(policy, levels, tokens, seed))
        return np.median(np.array(runs)[:, 6:], axis=0)

    assert means(12 * [CHAT], 48).min() >= 0.97
    assert means(6 * [CODE] + 6 * [CHAT], 48).mean() >= 0.97
    assert means(6 * [CHAT] + 6 * [CODE], 48).mean() >= 1.35
    assert means(6 * [CHAT] + 6 * [CODE], 256).min() >= 1.6


def test_a_drafter_that_listens_is_not_tried_only_because_it_is_new():
    policy = TreePolicy((PLAIN, CHAIN), listens=True)
    policy.estimate.hear(["others"], np.array([[40, 8]]))
    ready = {PLAIN: 1, CHAIN: 1}
    shapes = [policy.choose([row], CPU_COSTS, rounds=4, ready=ready) for row in range(8)]
    assert set(shapes) == {PLAIN}
    assert policy.most_rounds == 4  # nothing was heard of the row
    policy.estimate.hear([7], np.array([[16, 2]]))
    assert policy.choose([7], CPU_COSTS, rounds=4, ready=ready) == PLAIN
    assert policy.most_rounds is None
    policy.estimate.hear([8], np.array([[16, 15]]))
    policy.estimate.hear([8], np.array([[32, 31]]))
    assert policy.choose([8], CPU_COSTS, rounds=4, ready=ready) == CHAIN


def test_calls_that_try_are_as_short_as_the_engine_says():
    policy = TreePolicy([PLAIN, CHAIN], short_call=8)
    policy.choose(["a"], h100_costs())
    assert policy.most_rounds == 8


def test_the_size_of_the_program_may_be_given():
    # Two rows run in a program of 128: there drafting is dear.
    policy = TreePolicy(SHAPES, exploration=0)
    accepted = np.tile([[0], [0], [0], [1]], (50, 2))
    policy.estimate.observe(["a", "b"], CHAIN, accepted, accepted + 1)
    assert policy.choose(["a", "b"], h100_costs()) != PLAIN
    policy.shape = None
    assert policy.choose(["a", "b"], h100_costs(), size=128) == PLAIN


# Throughput.

LEVELS = (0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97)


@pytest.mark.parametrize(
    ("rows", "level"),
    [
        (128, 0.05),
        (32, 0.8),
        *(slow(rows, level) for rows in (1, 2, 4, 8, 16, 32, 64, 128) for level in LEVELS),
    ],
)
def test_close_to_the_best_fixed_shape_and_to_plain(rows: int, level: float):
    phases = [steady(rows, level, seconds=120 if rows <= 8 else 40)]
    fixed = {shape: simulate(shape, phases)[0] for shape in SHAPES}
    (rate,) = simulate(TreePolicy(SHAPES), phases)
    assert rate >= 0.97 * max(fixed.values())
    assert rate >= 0.98 * fixed[PLAIN]


@pytest.mark.parametrize("level", [0.2, slow(0.5), slow(0.85)])
@pytest.mark.parametrize("rows", [1, slow(8), slow(32)])
def test_a_new_policy_soon_finds_the_best_shape(rows: int, level: float):
    """What `jaxspec bench adaptive` measures on a GPU: programs of 8 rounds or one, a launch that
    takes a millisecond, and a second of plain decoding to learn in."""
    phases = [steady(rows, level, seconds) for seconds in (1.0, 2.0)]
    options = {"rounds": 16, "length": 512, "fixed": 8, "call": 1e-3}

    def rate(make: Callable[[], TreePolicy | TreeShape]) -> float:
        return sum(simulate(make(), phases, seed=seed, **options)[1] for seed in range(16)) / 16

    best = max(rate(lambda shape=shape: shape) for shape in SHAPES)
    assert rate(lambda: TreePolicy(SHAPES, short_call=8)) >= 0.95 * best


def test_better_than_any_fixed_shape_on_a_changing_load():
    fixed = max(overall(simulate(shape, MIXED), MIXED) for shape in SHAPES)
    assert overall(simulate(TreePolicy(SHAPES), MIXED), MIXED) >= 1.1 * fixed


def test_before_anything_is_tried_the_deepest_tree_that_is_not_slower_is_taken():
    policy = TreePolicy((PLAIN, *CHAINS))
    assert policy.choose(["a"], h100_costs()) == CHAINS[-1]
    dear = RoundCosts({(1, shape): float(shape.num_nodes) for shape in SHAPES})
    assert TreePolicy((PLAIN, *CHAINS)).choose(["a"], dear) == PLAIN


def test_while_the_best_shape_is_not_ready_another_runs_and_it_is_wanted():
    policy = TreePolicy((PLAIN, *CHAINS))
    assert policy.choose(["a"], h100_costs(), ready={PLAIN: 1}) == PLAIN
    assert policy.wanted == policy.best == CHAINS[-1]
    assert policy.choose(["a"], h100_costs(), ready={PLAIN: 1, CHAINS[-1]: 1}) == CHAINS[-1]


def test_what_is_a_little_better_is_wanted_when_much_was_lost_without_it():
    chain = CHAINS[1]
    costs = RoundCosts({(1, PLAIN): 1.0, (1, chain): 1.8})
    policy = TreePolicy((PLAIN, chain), exploration=0)
    wanted = []
    for _ in range(40):
        chosen = policy.choose(["a"], costs, ready={chain: 1})
        wanted.append(policy.wanted == PLAIN)
        policy.estimate.observe(["a"], chosen, np.array([[0], [1]]), np.array([[1], [2]]))
    assert chosen == chain and policy.best == PLAIN
    first = wanted.index(True)
    assert 5 < first < 30 and all(wanted[first:])
    policy.began_to_compile()
    policy.choose(["a"], costs, ready={chain: 1})
    assert policy.wanted != PLAIN


def test_a_larger_program_that_is_ready_counts_with_its_own_rows():
    chain = CHAINS[1]
    costs = {(1, PLAIN): 1.0, (1, chain): 1.2, (128, PLAIN): 2.0, (128, chain): 20.0}
    policy = TreePolicy((PLAIN, chain))
    ready = {PLAIN: 128, chain: 128}
    assert policy.choose(["a"], RoundCosts(costs), size=1, ready=ready) == PLAIN
    assert policy.wanted == chain
