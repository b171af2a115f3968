"""Budgets of reasoning at the nodes of random trees, against plain Python."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.reasoning import ReasoningBudget
from jaxspec.config.requests import check_requests
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.sampling import History, control_logits, make_controls
from jaxspec.decoding.sampling.budgets import forced_tokens, make_budgets
from jaxspec.decoding.sampling.controls import with_budgets
from jaxspec.decoding.trees.tree import path_tokens
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_trees import path_from_root, random_tree
from tests.helpers.sampling_reference import Budget

jit_forced = jax.jit(forced_tokens, compiler_options=FAST_COMPILE)
ROWS, NODES, LENGTH, KINDS = 6, 9, 24, 4


def random_budget(rng: np.random.Generator) -> ReasoningBudget:
    """Markers of few kinds of tokens, so that texts have them, and parts of them."""
    inside = bool(rng.integers(2))
    return ReasoningBudget(
        tokens=int(rng.integers(0, 6)),
        end=tuple(rng.integers(0, 2, size=rng.integers(1, 4)).tolist()),
        begin=tuple(rng.integers(2, KINDS, size=rng.integers(not inside, 3)).tolist()),
        inside=inside,
        repeats=bool(rng.integers(2)),
    )


@pytest.mark.parametrize("seed", range(40))
def test_each_node_counts_the_reasoning_of_its_own_path(seed: int):
    rng = np.random.default_rng(seed)
    budgets = [None, *(random_budget(rng) for _ in range(ROWS - 1))]
    lens = rng.integers(1, LENGTH + 1, size=ROWS).astype(np.int32)
    prompts = np.array([rng.integers(0, size + 1) for size in lens], np.int32)
    tokens = rng.integers(KINDS, size=(ROWS, LENGTH)).astype(np.int32)
    sizes = rng.integers(1, NODES + 1, size=ROWS).tolist()
    roots = tokens[np.arange(ROWS), lens - 1]
    tree = random_tree(rng, roots, sizes, NODES, 4)
    drafted = np.array(tree.tokens) % KINDS
    drafted[:, 0] = roots
    tree = tree.replace(tokens=drafted)
    history = History(jnp.asarray(tokens), jnp.asarray(lens), path_tokens(tree))
    found = np.asarray(jit_forced(make_budgets(budgets), history, jnp.asarray(prompts)))
    for row, budget in enumerate(budgets):
        for node in range(sizes[row]):
            path = path_from_root(np.asarray(tree.parents)[row], node)[1:]
            text = [*tokens[row, prompts[row] : lens[row]], *np.asarray(tree.tokens)[row, path]]
            wanted = None if budget is None else Budget(0, budget).forced(list(map(int, text)))
            assert found[row, node] == (-1 if wanted is None else wanted)


def test_only_the_forced_token_may_be_sampled():
    budgets = make_budgets([ReasoningBudget(1, (5,), inside=True), None])
    controls = with_budgets(make_controls(2, 8, prompt_lens=1), budgets)
    assert controls.used.tolist() == [True, False]
    history = History(
        jnp.array([[1, 2, 0], [1, 2, 0]]), jnp.array([2, 2]), jnp.zeros((2, 1, 0), jnp.int32)
    )
    logits = np.arange(16, dtype=np.float32).reshape(2, 1, 8)
    found = np.asarray(control_logits(jnp.asarray(logits), controls, history, jnp.full((2, 1), -1)))
    assert np.isfinite(found[0, 0]).nonzero()[0].tolist() == [5] and found[0, 0, 5] == 5
    np.testing.assert_array_equal(found[1], logits[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": -1}, "tokens must be an integer, at least 0, got -1"),
        ({"tokens": True}, "tokens must be an integer, at least 0"),
        ({"end": ()}, "end must have a token id"),
        ({"end": "x"}, "end must be at most 16 token ids"),
        ({"end": (1,) * 17}, "end must be at most 16 token ids"),
        ({"begin": (1.5,)}, "begin must be at most 16 token ids"),
        ({"begin": ()}, "begin must have a token id, or inside be True"),
    ],
)
def test_budgets_that_cannot_be_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ReasoningBudget(**({"tokens": 3, "end": (1,), "begin": (2,)} | fields))


def test_a_budget_needs_programs_with_controls():
    budget = ReasoningBudget(3, (1,), (200,))
    assert SamplingParams(reasoning_budget=budget).needs_controls
    with pytest.raises(ValueError, match=r"reasoning_budget has 200, outside 0\.\.99"):
        check_requests([[1]], [SamplingParams(reasoning_budget=budget)], 100, 50, 50)
    with pytest.raises(ValueError, match="reasoning_budget must be a ReasoningBudget, or None"):
        dataclasses.replace(SamplingParams(), reasoning_budget=3)
