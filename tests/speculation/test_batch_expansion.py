"""Tree attention over the paged cache scores as plain sequences do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SpeculationConfig
from jaxspec.speculation.batch_expansion import score_by_batch_expansion
from jaxspec.speculation.round import verify
from tests.random_models import (
    CONFIG,
    empty_state,
    make_params,
    random_prompts,
    random_target,
    read_prompts,
)
from tests.random_trees import random_tree

WINDOW = 10
PROMPTS = random_prompts((31, 1, 14), seed=3)
WIDTH = 64


@pytest.mark.parametrize("order_invariant", [False, True])
@pytest.mark.parametrize("windows", [(None, None), (WINDOW, None), (WINDOW, WINDOW)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_verify_scores_as_batch_expansion_does(page_size, windows, order_invariant):
    config = dataclasses.replace(CONFIG, sliding_windows=windows)
    spec = SpeculationConfig(num_nodes=WIDTH, max_depth=WINDOW - 1, top_k=8)
    params = make_params("none", spec, random_target(config, context=1.0))
    state = read_prompts(params, empty_state(params, 3, 48, page_size), PROMPTS)
    both = jax.jit(
        lambda state, tree: (
            verify(params.target, state, tree, order_invariant=order_invariant)[0],
            score_by_batch_expansion(params.target, state, tree),
        )
    )
    for seed, sizes in enumerate(([64, 64, 64], [1, 2, 33], [40, 17, 32])):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, np.asarray(state.roots), sizes, WIDTH, spec.max_depth)
        found, expected = both(state, tree)
        for row, size in enumerate(sizes):
            np.testing.assert_allclose(found[row, :size], expected[row, :size], atol=1e-4)


def test_a_window_changes_the_scores_of_a_longer_prefix():
    tree, scores = None, []
    for windows in ((None, None), (WINDOW, WINDOW)):
        config = dataclasses.replace(CONFIG, sliding_windows=windows)
        spec = SpeculationConfig(num_nodes=8, max_depth=WINDOW - 1, top_k=8)
        params = make_params("none", spec, random_target(config, context=1.0))
        state = read_prompts(params, empty_state(params, 3, 48), PROMPTS)
        if tree is None:
            rng = np.random.default_rng(0)
            tree = random_tree(rng, np.asarray(state.roots), [8] * 3, 8, spec.max_depth)
        scores.append(score_by_batch_expansion(params.target, state, tree))
    assert jnp.abs(scores[0][0] - scores[1][0]).max() > 0.1, "prefix of 31"
