"""Random draft trees, and their ancestors the slow way."""

import jax
import numpy as np

from jaxspec.decoding.trees.tree import DraftTree, make_tree
from pallas_kernels.paged_attention.cases import random_parents
from tests.helpers.programs import FAST_COMPILE

_make_tree = jax.jit(make_tree, static_argnames="max_depth", compiler_options=FAST_COMPILE)


def path_from_root(parents: np.ndarray, node: int) -> list[int]:
    """Nodes from the root down to ``node``."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def random_tree(
    rng: np.random.Generator, roots: np.ndarray, sizes: list[int], width: int, max_depth: int
) -> DraftTree:
    """One tree of ``sizes`` [B] nodes a row, of tokens < 64; padding is noise.

    NumPy's arrays, so that tests can take parts of any size without a program for each.
    """
    batch = len(sizes)
    parents, tokens = rng.integers(-5, 50, (batch, width)), rng.integers(64, size=(batch, width))
    for row, size in zip(parents, sizes, strict=True):
        row[:size] = random_parents(rng, size, max_depth)
    tokens[:, 0] = roots
    made = _make_tree(
        tokens.astype(np.int32), parents.astype(np.int32), np.array(sizes, np.int32), max_depth
    )
    return jax.device_get(made)
