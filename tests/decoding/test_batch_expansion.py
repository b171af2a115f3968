"""Tree attention over the paged cache scores as plain sequences do."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import Array

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.round import verify
from tests.helpers.batch_expansion import score_by_batch_expansion
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    make_params,
    random_prompts,
    random_target,
    read_prompts,
    tiny_config,
)
from tests.helpers.random_trees import random_tree

WINDOW = 10
PROMPTS = random_prompts((31, 1, 14), seed=3)
TREE = SpeculationConfig(num_nodes=64, max_depth=WINDOW - 1, top_k=8)
SIZES = ([64, 64, 64], [1, 2, 33], [40, 17, 32])


def both_scores(
    windows: tuple[int | None, ...], page_size: int = 16, order_invariant: bool = False
) -> list[tuple[Array, Array]]:
    """Logits [B, N, V] of verify and of batch expansion, for random trees of each of SIZES."""
    config = tiny_config(sliding_windows=windows)
    spec = dataclasses.replace(TREE, verify_width=TREE.num_nodes if order_invariant else None)
    params = make_params("none", spec, random_target(config, context=1.0))
    state = admit_prompts(params, empty_state(params, 3, 48, page_size), PROMPTS)
    state = read_prompts(params, state)
    both = jax.jit(
        lambda params, state, tree: (
            verify(params.target, state, tree, params.round_options()).logits,
            score_by_batch_expansion(params.target, state, tree),
        ),
        compiler_options=FAST_COMPILE,
    )
    rng, roots = np.random.default_rng(0), np.asarray(state.rows.roots)
    trees = [random_tree(rng, roots, sizes, TREE.num_nodes, TREE.max_depth) for sizes in SIZES]
    return [both(params, state, tree) for tree in trees]


@pytest.mark.parametrize(
    ("windows", "page_size", "order_invariant"),
    [
        slow((None, None), 1, False),
        slow((None, None), 16, True),
        slow((WINDOW, None), 1, True),
        ((WINDOW, WINDOW), 16, False),
    ],
)
def test_verify_scores_as_batch_expansion_does(windows, page_size, order_invariant):
    scores = both_scores(windows, page_size, order_invariant)
    for sizes, (found, expected) in zip(SIZES, scores, strict=True):
        for row, size in enumerate(sizes):
            np.testing.assert_allclose(found[row, :size], expected[row, :size], atol=1e-4)


@pytest.mark.slow
def test_a_window_matters_to_a_longer_prefix():
    (_, full), *_ = both_scores((None, None))
    (_, windowed), *_ = both_scores((WINDOW, WINDOW))
    assert abs(full[0] - windowed[0]).max() > 0.1, "the prefix of 31"
