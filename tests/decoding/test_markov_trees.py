"""Trees of block heads with a Markov head (DSpark): beams, against searches that try every path.

Each level of a tree has ``top_k`` beams, so a tree may miss some of the likeliest paths. It misses
none if it has few nodes or two levels, and little otherwise.
"""

import functools
import heapq
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.speculation import SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.decoding.sampling import Sampling, make_sampling
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections import Block
from tests.decoding.test_acceptance import proposer_of
from tests.decoding.test_lattice import CONTEXTS, ROOTS, SEEDS, noise_at, paths_of
from tests.helpers.block_heads import block_target, random_head
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import CONFIG

VOCAB, DEEPEST = CONFIG.vocab_size, 6
Path = tuple[int, ...]
Scores = Callable[[Path], np.ndarray]  # log-probabilities [V] of the token after a path


@functools.cache
def drafter() -> BlockDrafter:
    """Its Markov head says about as much as its blocks."""
    head = random_head(CONFIG, "dspark")
    assert head.markov is not None
    before, after = np.random.default_rng(0).standard_normal((2, *head.markov.before.shape))
    scale = 1.5 * before.shape[1] ** -0.25
    markov = head.markov.replace(before=jnp.float32(scale * before), after=scale * after)
    return BlockDrafter(head=head.replace(correction=markov))


def block_logits(seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((2, DEEPEST, VOCAB))
    return (1.5 * noise).astype(np.float32)


@functools.partial(jax.jit, static_argnames="spec", compiler_options=FAST_COMPILE)
def grown(
    target: Decoder, own: BlockDrafter, logits: Any, sampling: Sampling, spec: SpeculationConfig
) -> DraftTree:
    proposer = proposer_of(spec, sampling, CONTEXTS, target_vocab=VOCAB)
    return own._tree(target, proposer, ROOTS, Block(logits[..., :0], logits))


def tree_of(shape: TreeShape, logits: np.ndarray, temperature: float) -> DraftTree:
    spec = SpeculationConfig(shape.num_nodes, shape.max_depth, shape.top_k)
    sampling = make_sampling(2, temperature=temperature, seeds=SEEDS)
    cut = logits[:, : shape.max_depth]
    return jax.device_get(grown(block_target(), drafter(), cut, sampling, spec))


def scores_of(logits: np.ndarray, row: int, temperature: float) -> Scores:
    """By the equations, in float64. Coupled trees rank tokens under the target's own noise."""
    markov = drafter().head.markov
    assert markov is not None
    before, after = (np.asarray(x, np.float64) for x in (markov.before, markov.after))
    noise = noise_at(DEEPEST, VOCAB)[row]

    @functools.cache
    def scores(path: Path) -> np.ndarray:
        last = path[-1] if path else int(ROOTS[row])
        ranked = logits[row, len(path)] + after @ before[last]
        if temperature:
            ranked = ranked / temperature + noise[len(path)]
        return ranked - np.log(np.exp(ranked).sum())

    return scores


def total(scores: Scores, path: Path) -> float:
    return math.fsum(scores(path[:depth])[token] for depth, token in enumerate(path))


def value(scores: Scores, paths: set[Path]) -> float:
    """How many tokens are accepted on average if the target draws what the scores say."""
    return math.fsum(math.exp(total(scores, path)) for path in paths)


def children(scores: Scores, path: Path, top_k: int) -> list[Path]:
    return [(*path, token) for token in np.argsort(-scores(path))[:top_k].tolist()]


def likeliest_paths(scores: Scores, shape: TreeShape) -> set[Path]:
    """Best first: the likeliest of all paths of the ``top_k`` best tokens after each."""
    found: set[Path] = set()
    heap: list[tuple[float, Path]] = [(0.0, ())]
    while len(found) < shape.num_nodes:
        _, path = heapq.heappop(heap)
        found.add(path)
        if len(path) < shape.max_depth:
            for child in children(scores, path, shape.top_k):
                heapq.heappush(heap, (-total(scores, child), child))
    return found - {()}


def beam_paths(scores: Scores, shape: TreeShape) -> set[Path]:
    """The likeliest of those that are found with ``top_k`` beams a level."""
    beams: list[Path] = [()]
    found: list[Path] = []
    for _ in range(shape.max_depth):
        level = [child for beam in beams for child in children(scores, beam, shape.top_k)]
        found += level
        beams = sorted(level, key=lambda path: -total(scores, path))[: shape.top_k]
    return set(sorted(found, key=lambda path: -total(scores, path))[: shape.num_nodes - 1])


SHAPES = [TreeShape(12, 3, 3), TreeShape(30, 6, 4), TreeShape(16, 4, 3), TreeShape(30, 5, 8)]


@pytest.mark.parametrize("temperature", [0.7, slow(0.0)])
@pytest.mark.parametrize("shape", [SHAPES[0], *map(slow, SHAPES[1:])], ids=str)
def test_a_tree_has_the_likeliest_paths_of_its_beams(shape: TreeShape, temperature: float):
    misses = []
    for seed in range(8):
        logits = block_logits(seed)
        tree = tree_of(shape, logits, temperature)
        assert tree.num_nodes.tolist() == [shape.num_nodes] * 2
        assert tree.depth.max() <= shape.max_depth
        for row in range(2):
            scores, found = scores_of(logits, row, temperature), paths_of(tree, row)
            assert found == beam_paths(scores, shape)
            best, own = value(scores, likeliest_paths(scores, shape)), value(scores, found)
            misses.append(best - own)
    assert min(misses) >= 0 and max(misses) < 0.1 and np.mean(misses) < 0.03


def few(top_k: int, depth: int) -> TreeShape:
    """A tree of so few nodes that no level has a parent which is no beam: it would take
    ``top_k + 1`` nodes of a level, a child, and two nodes of the level before at least."""
    return TreeShape(top_k + 4, depth, top_k)


@pytest.mark.parametrize(
    "shape",
    [few(3, 5), slow(few(4, 6)), slow(TreeShape(15, 2, 4)), slow(TreeShape(40, 2, 8))],
    ids=str,
)
def test_a_tree_of_few_nodes_or_two_levels_has_the_likeliest_of_all_paths(shape: TreeShape):
    for seed in range(8):
        logits = block_logits(seed)
        tree = tree_of(shape, logits, 0.0)
        for row in range(2):
            scores = scores_of(logits, row, 0.0)
            assert paths_of(tree, row) == likeliest_paths(scores, shape)
