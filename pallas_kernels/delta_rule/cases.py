"""Shapes of delta_rule for its tests, and random arguments for them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.delta_rule.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """``batch`` sequences that verify ``nodes`` nodes; heads as in the kernels."""

    batch: int
    nodes: int
    groups: int = 2
    values: int = 2
    v_dim: int = 128
    capacity: int = 8
    k_dim: int = 128
    taps: int = 4

    def __str__(self) -> str:
        heads = f"{self.groups} x {self.values} heads of {self.v_dim}"
        return f"{self.batch} x {self.nodes} nodes, {heads}, windows of {self.capacity}"


TEST_CASES = (
    Case(1, 1),
    Case(2, 6),
    Case(3, 16, groups=1, v_dim=64),
    Case(2, 2, groups=1, values=4, capacity=32),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[tuple, tuple]:
    """Positional arguments of delta_read and of delta_commit."""
    rng = np.random.default_rng(seed)
    rows, nodes = case.batch + 2, case.nodes

    def tokens(batch: int, size: int) -> Tokens:
        heads = (batch, size, case.groups, case.values)
        return Tokens(
            k=unit(batch, size),
            v=normal(*heads, case.v_dim),
            g=jnp.asarray(-rng.exponential(0.3, heads), jnp.float32),
            beta=jnp.asarray(rng.random(heads), jnp.float32),
        )

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def unit(batch: int, size: int) -> Array:
        x = normal(batch, size, case.groups, case.k_dim)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    s = normal(rows, case.groups, case.values, case.v_dim, case.k_dim)
    window, drafted = tokens(rows, case.capacity), tokens(case.batch, nodes)
    places = jnp.asarray(rng.permutation(rows)[: case.batch], jnp.int32)
    held = jnp.asarray(rng.integers(0, case.capacity, case.batch), jnp.int32)
    ancestors, depth, path, counts = _trees(rng, case)
    wide = 2 * case.k_dim + case.values * case.v_dim
    channels, new = (
        normal(rows, case.taps - 1, case.groups, wide),
        normal(case.batch, nodes, case.groups, wide),
    )
    channels, new = channels.astype(jnp.bfloat16), new.astype(jnp.bfloat16)
    q = unit(case.batch, nodes)
    return (
        (s, window, places, held, q, drafted, ancestors, depth),
        (s, window, channels, places, held, drafted, new, path, counts),
    )


def make_run_arguments(case: Case, seed: int = 0) -> tuple:
    """Positional arguments of delta_run, of ``nodes`` tokens, of which some are padding."""
    (s, window, rows, held, q, tokens, *_), _ = make_arguments(case, seed)
    counts = jnp.asarray([case.nodes, 0, *range(1, case.batch - 1)][: case.batch], jnp.int32)
    return s, window, rows, held, counts, q, tokens


def _trees(rng: np.random.Generator, case: Case) -> tuple[Array, Array, Array, Array]:
    """Ancestors [B, N, N], depths [B, N], and a path [B, A] in each tree with its length [B]."""
    longest = min(case.nodes, 6, case.capacity)
    ancestors = np.zeros((case.batch, case.nodes, case.nodes), bool)
    path, counts = np.zeros((case.batch, longest), np.int32), np.zeros(case.batch, np.int32)
    for row, own in enumerate(ancestors):
        for node in range(case.nodes):
            parents = [other for other in range(node) if own[other].sum() < longest]
            if parents:
                own[node] = own[rng.choice(parents)]
            own[node, node] = True
        accepted = np.flatnonzero(own[rng.integers(case.nodes)])
        counts[row] = len(accepted) if row != 1 else 0  # a row that does not change
        path[row, : len(accepted)] = accepted
    depth = jnp.asarray(ancestors.sum(-1) - 1, jnp.int32)
    return jnp.asarray(ancestors), depth, jnp.asarray(path), jnp.asarray(counts)
