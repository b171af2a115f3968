"""Random draft trees, and their ancestors the slow way."""

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.trees.tree import DraftTree, make_tree
from pallas_kernels.paged_attention.cases import random_parents


def path_from_root(parents: np.ndarray, node: int) -> list[int]:
    """Nodes from the root down to ``node``."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def random_tree(
    rng: np.random.Generator, roots: np.ndarray, sizes: list[int], width: int, max_depth: int
) -> DraftTree:
    """One tree of ``sizes`` [B] nodes a row, of tokens < 64; padding is noise."""
    batch = len(sizes)
    parents, tokens = rng.integers(-5, 50, (batch, width)), rng.integers(64, size=(batch, width))
    for row, size in zip(parents, sizes, strict=True):
        row[:size] = random_parents(rng, size, max_depth)
    tokens[:, 0] = roots
    return make_tree(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(sizes), max_depth)
