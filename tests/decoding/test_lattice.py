"""Trees from a block's logits hold the likeliest paths.

That texts keep the target's distribution is tested in test_block_distribution.py.
"""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from jax import Array

from jaxspec.config.speculation import SpeculationConfig, TreeShape
from jaxspec.decoding.sampling import Sampling, make_sampling
from jaxspec.decoding.sampling.noise import Stream, gumbel
from jaxspec.decoding.trees.lattice import lattice_tree
from jaxspec.decoding.trees.tree import DraftTree
from tests.decoding.test_acceptance import (
    proposer_of,
)
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE

ROOTS, CONTEXTS = jax.device_put(np.array([[3, 5], [17, 40]], np.int32))
SEEDS = np.array([8, 9])
jit_gumbel = jax.jit(gumbel, static_argnums=1)


def tree_of(spec: SpeculationConfig, logits: np.ndarray, sampling: Sampling) -> DraftTree:
    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def made(logits: Array, sampling: Sampling) -> DraftTree:
        proposer = proposer_of(spec, sampling, CONTEXTS, target_vocab=logits.shape[-1])
        return lattice_tree(proposer, ROOTS, logits)

    return jax.device_get(made(logits, sampling))


def random_logits(depth: int, vocab: int = 12) -> np.ndarray:
    noise = np.random.default_rng(depth).standard_normal((2, depth, vocab))
    return (2 * noise).astype(np.float32)


def noise_at(depth: int, vocab: int = 12) -> np.ndarray:
    """The target's own noise at the drafted positions: [2, depth, V]."""
    positions = np.asarray(CONTEXTS)[:, None] + 1 + np.arange(depth)
    return np.asarray(jit_gumbel(SEEDS, Stream.TARGET, positions, np.arange(vocab)))


def paths_of(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root to every node, the root itself left out."""
    tokens, parents = (np.asarray(x)[row].tolist() for x in (tree.tokens, tree.parents))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    assert len(set(paths)) == len(paths), "siblings hold distinct tokens"
    return set(paths[1:])


def best_of_all(logits: np.ndarray, shape: TreeShape) -> set[tuple[int, ...]]:
    """By trying every path through the ``top_k`` best tokens of each depth."""
    logs = logits.astype(np.float64)
    logs = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
    best = np.argsort(-logs, axis=1)[:, : shape.top_k].tolist()
    scored = []
    for depth in range(1, shape.max_depth + 1):
        for path in itertools.product(*best[:depth]):
            scored.append((math.fsum(logs[i, token] for i, token in enumerate(path)), path))
    return {path for _, path in sorted(scored, reverse=True)[: shape.num_nodes - 1]}


SHAPES = [TreeShape(12, 3, 3), TreeShape(30, 5, 4), TreeShape(4, 3, 3), TreeShape(6, 5, 2)]


@pytest.mark.parametrize("temperature", [0.7, slow(0.0)])
@pytest.mark.parametrize("shape", [SHAPES[0], *map(slow, SHAPES[1:])], ids=str)
def test_a_tree_has_the_likeliest_paths(shape: TreeShape, temperature: float):
    spec = SpeculationConfig(shape.num_nodes, shape.max_depth, shape.top_k)
    logits = random_logits(shape.max_depth)
    sampling = make_sampling(2, temperature=temperature, seeds=SEEDS)
    tree = tree_of(spec, logits, sampling)
    assert tree.num_nodes.tolist() == [shape.num_nodes] * 2
    assert tree.depth.max() <= shape.max_depth
    ranked = logits
    if temperature:  # coupled: tokens are ranked under the noise that the target draws with
        ranked = logits / temperature + noise_at(shape.max_depth)
    for row in range(2):
        assert paths_of(tree, row) == best_of_all(ranked[row], spec)


def test_a_chain_has_the_tokens_that_the_target_would_draw():
    logits = random_logits(5)
    sampling = make_sampling(2, temperature=np.array([0.0, 0.7]), seeds=SEEDS)
    tree = tree_of(SpeculationConfig.chain(5), logits, sampling)
    assert tree.is_chain and tree.probs is None
    assert tree.tokens[:, 0].tolist() == ROOTS.tolist()
    assert tree.tokens[0, 1:].tolist() == logits[0].argmax(-1).tolist()
    drawn = (logits[1] / np.float32(0.7) + noise_at(5)[1]).argmax(-1)
    assert tree.tokens[1, 1:].tolist() == drawn.tolist()


def test_tokens_drawn_for_the_rejection_rule_come_with_their_distributions():
    logits = random_logits(3)
    sampling = make_sampling(2, temperature=0.7, seeds=SEEDS)
    tree = tree_of(SpeculationConfig.chain(3, "rejection"), logits, sampling)
    assert tree.probs is not None and not tree.probs[:, 0].any()
    exps = np.exp(logits / 0.7)
    expected = exps / exps.sum(-1, keepdims=True)
    np.testing.assert_allclose(tree.probs[:, 1:], expected, atol=1e-6)


def test_more_children_than_draft_tokens():
    wide = SpeculationConfig(num_nodes=20, max_depth=2, top_k=13)
    with pytest.raises(ValueError, match="top_k 13 is wider than the draft vocabulary of 12"):
        tree_of(wide, random_logits(2), make_sampling(2))
