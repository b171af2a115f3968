"""The specification of top_k in jnp, and a top-k for GPUs that does not sort.

XLA's GPU backend sorts all entries for lax.top_k (measured on an H100: 135 us for the 10 largest of
10 x 32,000). Instead, the rank of an entry is found by counting the entries that precede it: a
comparison of all pairs, which is one small kernel on a GPU. A long row is first reduced to its k
best chunks (17 us).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

CHUNK = 64  # entries; near the square root of a row's length, which balances the two steps
ALL_PAIRS = 1024  # longest row of which all pairs are compared at once


def top_k_reference(x: Array, k: int) -> tuple[Array, Array, Array]:
    """See pallas_kernels.top_k.top_k."""
    return *local_top_k(x, k), jax.nn.logsumexp(x, axis=-1)


def local_top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest entries and their indices: x [..., n] -> ([..., k], int32 [..., k]).

    Entries are in descending order; equal entries are in order of their indices. With NaN, values
    are unspecified; indices stay in range.
    """
    values, indices = lax.platform_dependent(
        x, cpu=functools.partial(_by_sorting, k=k), default=functools.partial(by_counting, k=k)
    )
    return values, indices


def best_with(x: Array, k: int, beside: Sequence[Array]) -> tuple[Array, ...]:
    """local_top_k's values, and what arrays ``beside`` of x's shape, of integers from 0, have at
    its indices: on a GPU no launch more than the values, of rows up to ALL_PAIRS."""
    return lax.platform_dependent(
        x,
        *beside,
        cpu=functools.partial(_taken, _by_sorting, k=k),
        default=functools.partial(best_with_by_counting, k=k),
    )


def best_with_by_counting(x: Array, *beside: Array, k: int) -> tuple[Array, ...]:
    """best_with by counting, on any device."""
    if x.shape[-1] > ALL_PAIRS:
        return _taken(by_counting, x, *beside, k=k)
    ids = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    return _by_rank(x, ids, k, beside)


def _taken(find: Callable[..., Any], x: Array, *beside: Array, k: int) -> tuple[Array, ...]:
    values, indices = find(x, k=k)
    return values, *(jnp.take_along_axis(part, indices, axis=-1) for part in beside)


def _by_sorting(x: Array, *, k: int) -> tuple[Array, Array]:
    values, indices = lax.top_k(x, k)
    return values, indices


def by_counting(x: Array, *, k: int) -> tuple[Array, Array]:
    """local_top_k by counting, on any device. It still sorts where k is a large share of a long
    row."""
    size = x.shape[-1]
    if size > ALL_PAIRS and k * CHUNK >= size:
        return _by_sorting(x, k=k)  # most chunks would be candidates
    if size <= ALL_PAIRS:
        ids = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), x.shape)
        values, indices = best_with_by_counting(x, ids, k=k)
        return values, indices
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % CHUNK)]
    chunks = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], -1, CHUNK)
    # Ordered by maximum, a chunk that holds one of the k largest is among the first k.
    _, best = by_counting(jnp.max(chunks, axis=-1), k=k)
    candidates = jnp.take_along_axis(chunks, best[..., None], axis=-2)
    ids = best[..., None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    flat = (*x.shape[:-1], k * CHUNK)
    ids = ids.reshape(flat)
    values, indices = _by_rank(candidates.reshape(flat), ids, k, [ids])
    return values, jnp.minimum(indices, size - 1)  # with NaN, padding might have been chosen


def _by_rank(x: Array, ids: Array, k: int, beside: Sequence[Array]) -> tuple[Array, ...]:
    """The k first entries of x [..., n], ordered by value (descending), then by id, and those of
    ``beside``, integers from 0, in the same order."""
    entry, other = (x[..., :, None], ids[..., :, None]), (x[..., None, :], ids[..., None, :])
    precedes = (other[0] > entry[0]) | ((other[0] == entry[0]) & (other[1] < entry[1]))
    rank = jnp.sum(precedes, axis=-1, dtype=jnp.int32)
    chosen = rank[..., None, :] == jnp.arange(k)[:, None]  # [..., k, n]
    values = jnp.max(jnp.where(chosen, x[..., None, :], -jnp.inf), axis=-1)
    return values, *(jnp.max(jnp.where(chosen, part[..., None, :], 0), axis=-1) for part in beside)
