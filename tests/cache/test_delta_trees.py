"""What a path reads in other trees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxspec.cache import delta_rule
from jaxspec.cache.delta_rule import DeltaInputs
from tests.cache.test_delta_rule import random_inputs
from tests.helpers.marks import slow

KEYS, VALUES, FOLDED, LENGTH = 128, 128, 32, 8
SIZES = 1, 1, KEYS, VALUES


def by_depth(
    s: Array, window: DeltaInputs, q: Array, nodes: DeltaInputs, ancestors: Array
) -> Array:
    depth = jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1
    return delta_rule.tree(s, window, q, nodes, ancestors[None], depth[None])[0, :, 0, 0]


def read_in_trees(trees: int, size: int, branch: float) -> np.ndarray:
    """What a path reads in random trees of ``size`` nodes: [trees, LENGTH, VALUES]. A value
    elsewhere in each is ``branch``."""
    rng, read = np.random.default_rng(0), jax.jit(by_depth)
    s = jnp.asarray(0.1 * rng.standard_normal((1, 1, 1, VALUES, KEYS)), jnp.float32)
    (_, window), path = (random_inputs(rng, 1, size, SIZES) for size in (FOLDED, LENGTH))
    found = []
    for _ in range(trees):
        nodes = random_inputs(rng, 1, size, SIZES)
        places = np.array([0, *np.sort(rng.permutation(size - 1)[: LENGTH - 1] + 1)])
        parents = [int(rng.integers(0, max(node, 1))) for node in range(size)]
        for parent, node in itertools.pairwise(places):
            parents[node] = int(parent)
        ancestors = np.eye(size, dtype=bool)
        for node in range(1, size):
            ancestors[node] |= ancestors[parents[node]]
        for whole, own in zip(*map(jax.tree.leaves, (nodes, path)), strict=True):
            whole[:, places] = own
        other = next(node for node in range(size) if node not in places)
        q, inputs = nodes
        inputs.v[0, other, 0, 0, 0] = branch
        out = read(s, window, q, inputs, jnp.asarray(ancestors))
        found.append(np.asarray(out)[places])
    return np.array(found)


@pytest.mark.parametrize(("trees", "size"), [(20, 32), slow(200, 32), slow(200, 33), slow(200, 64)])
def test_a_path_reads_the_same_bits_in_every_tree(trees: int, size: int):
    found = read_in_trees(trees, size, 1.0)
    assert (found == found[0]).all()


def test_a_path_sees_no_nan_of_another_branch():
    assert np.array_equal(read_in_trees(5, 32, np.nan), read_in_trees(5, 32, 1.0))
