"""Chains and trees from scores of pairs of candidates hold the likeliest paths of all."""

import functools
import heapq
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.speculation import SpeculationConfig, TreeShape
from jaxspec.decoding.sampling import Sampling, make_sampling
from jaxspec.decoding.trees.lattice import pair_tree
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.models.heads.corrections import PairScores
from tests.decoding.test_acceptance import proposer_of
from tests.decoding.test_lattice import CONTEXTS, ROOTS, SEEDS, noise_at, paths_of
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE

VOCAB, COUNT = 40, 6


def tree_of(spec: SpeculationConfig, scores: PairScores, sampling: Sampling) -> DraftTree:
    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def made(scores: PairScores, sampling: Sampling) -> DraftTree:
        proposer = proposer_of(spec, sampling, CONTEXTS, target_vocab=VOCAB)
        return pair_tree(proposer, ROOTS, scores)

    return jax.device_get(made(scores, sampling))


def random_scores(depth: int) -> PairScores:
    rng = np.random.default_rng(depth)
    tokens = [[rng.permutation(VOCAB)[:COUNT] for _ in range(depth)] for _ in range(2)]
    first = 1.5 * rng.standard_normal((2, COUNT))
    pairs = 1.5 * rng.standard_normal((2, depth - 1, COUNT, COUNT))
    given: Any = np.array(tokens), first.astype(np.float32), pairs.astype(np.float32)
    return PairScores(*given)


def log_probs(scores: PairScores, row: int, temperature: float) -> list[np.ndarray]:
    """Of each depth behind each candidate of the depth before [1 or K, K], in float64. Coupled
    trees rank tokens under the target's own noise."""
    noise = noise_at(scores.tokens.shape[1], VOCAB)[row]
    found = []
    for depth, tokens in enumerate(np.asarray(scores.tokens[row])):
        ranked = scores.pairs[row, depth - 1] if depth else scores.first[row][None]
        ranked = np.asarray(ranked, np.float64)
        if temperature:
            ranked = ranked / temperature + noise[depth][tokens]
        found.append(ranked - np.log(np.exp(ranked).sum(axis=1, keepdims=True)))
    return found


def likeliest_paths(scores: PairScores, row: int, shape: TreeShape, temperature: float):
    """Best first, as tokens: the likeliest of all paths of the ``top_k`` best after each."""
    logs, tokens = log_probs(scores, row, temperature), np.asarray(scores.tokens[row])
    found: set[tuple[int, ...]] = set()
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while len(found) < shape.num_nodes and heap:
        total, path = heapq.heappop(heap)
        found.add(path)
        if len(path) < shape.max_depth:
            after = logs[len(path)][path[-1] if path else 0]
            for place in np.argsort(-after)[: shape.top_k].tolist():
                heapq.heappush(heap, (total - after[place], (*path, place)))
    return {tuple(int(tokens[i, place]) for i, place in enumerate(path)) for path in found} - {()}


SHAPES = [TreeShape(64, 4, 4), TreeShape(12, 3, 3), TreeShape(30, 5, 6), TreeShape(5, 1, 5)]


@pytest.mark.parametrize("temperature", [0.7, slow(0.0)])
@pytest.mark.parametrize("shape", [SHAPES[0], *map(slow, SHAPES[1:])], ids=str)
def test_a_tree_has_the_likeliest_of_all_paths(shape: TreeShape, temperature: float):
    spec = SpeculationConfig(shape.num_nodes, shape.max_depth, shape.top_k)
    scores = random_scores(shape.max_depth)
    tree = tree_of(spec, scores, make_sampling(2, temperature=temperature, seeds=SEEDS))
    assert tree.num_nodes.tolist() == [shape.num_nodes] * 2
    for row in range(2):
        assert paths_of(tree, row) == likeliest_paths(scores, row, shape, temperature)


def test_a_chain_walks_from_token_to_token_as_the_target_would_draw():
    scores = random_scores(5)
    sampling = make_sampling(2, temperature=np.array([0.0, 0.7]), seeds=SEEDS)
    tree = tree_of(SpeculationConfig.chain(5), scores, sampling)
    assert tree.is_chain and tree.probs is None
    for row, temperature in enumerate((0.0, 0.7)):
        place, path = 0, []
        for depth, logs in enumerate(log_probs(scores, row, temperature)):
            place = int(logs[place].argmax())
            path.append(int(scores.tokens[row, depth, place]))
        assert tree.tokens[row, 1:].tolist() == path


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def ranked(logits: jax.Array, sampling: Sampling) -> jax.Array | None:
    proposer = proposer_of(SpeculationConfig(16, 4, 4), sampling, CONTEXTS, target_vocab=VOCAB)
    return proposer.ranked(logits, 1 + jnp.arange(logits.shape[1]))


def test_candidates_are_those_that_are_kept_by_their_noise_and_then_the_likeliest():
    """A row that keeps two tokens, beside one of temperature 0."""
    logits = 3 * np.random.default_rng(4).standard_normal((2, 3, VOCAB), np.float32)
    sampling = make_sampling(2, temperature=np.array([0.7, 0.0]), top_k=2, seeds=SEEDS)
    found = np.argsort(-np.asarray(ranked(logits, sampling)), axis=2, kind="stable")
    likeliest = np.argsort(-logits, axis=2, kind="stable")
    np.testing.assert_array_equal(found[1], likeliest[1])
    np.testing.assert_array_equal(found[0, :, 2:], likeliest[0, :, 2:])
    noise = noise_at(3, VOCAB)[0]
    for depth, kept in enumerate(likeliest[0, :, :2]):
        scores = logits[0, depth, kept] / 0.7 + noise[depth, kept]
        assert found[0, depth, :2].tolist() == kept[np.argsort(-scores)].tolist()


def test_tokens_drawn_for_the_rejection_rule_come_with_their_distributions():
    """Over the candidates behind the token before, and 0 elsewhere."""
    scores = random_scores(3)
    sampling = make_sampling(2, temperature=0.7, seeds=SEEDS)
    tree = tree_of(SpeculationConfig.chain(3, "rejection"), scores, sampling)
    assert tree.probs is not None and not tree.probs[:, 0].any()
    for row in range(2):
        place = 0
        for depth, tokens in enumerate(scores.tokens[row].tolist()):
            logits = scores.pairs[row, depth - 1, place] if depth else scores.first[row]
            exps = np.exp(np.asarray(logits, np.float64) / 0.7)
            expected = np.zeros(VOCAB)
            expected[tokens] = exps / exps.sum()
            np.testing.assert_allclose(tree.probs[row, 1 + depth], expected, atol=1e-6)
            place = tokens.index(int(tree.tokens[row, 1 + depth]))
    assert math.isclose(float(tree.probs[:, 1:].sum()), 6, rel_tol=1e-5)


def test_more_children_than_candidates():
    wide = SpeculationConfig(num_nodes=20, max_depth=2, top_k=7)
    with pytest.raises(ValueError, match="top_k 7 is wider than this drafter's choice among 6 can"):
        tree_of(wide, random_scores(2), make_sampling(2))
