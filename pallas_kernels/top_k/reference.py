"""The specification of top_k in jnp, and the few largest of many entries without a sort.

XLA's GPU backend sorts all entries for lax.top_k (measured on an H100: 135 us for 10 of 10 x
32,000). Counting how many entries precede each one is a comparison of all pairs, which a GPU does
in one small kernel; of many entries only those of the k best chunks are compared (17 us).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

CHUNK = 64  # entries; about the square root of a row, which balances the two steps
ALL_PAIRS = 1024  # entries up to which all pairs are compared at once


def top_k_reference(x: Array, k: int) -> tuple[Array, Array, Array]:
    """See pallas_kernels.top_k.top_k."""
    return *local_top_k(x, k), jax.nn.logsumexp(x, axis=-1)


def local_top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest, largest first, the first of equals first: x [..., n] -> ([..., k], int32).

    What a NaN does to the values is not said; indices stay in range.
    """
    values, indices = lax.platform_dependent(
        x, cpu=functools.partial(_by_sorting, k=k), default=functools.partial(by_counting, k=k)
    )
    return values, indices


def _by_sorting(x: Array, *, k: int) -> tuple[Array, Array]:
    values, indices = lax.top_k(x, k)
    return values, indices


def by_counting(x: Array, *, k: int) -> tuple[Array, Array]:
    """local_top_k without a sort, on any device, unless k is a large part of many."""
    size = x.shape[-1]
    if size > ALL_PAIRS and k * CHUNK >= size:
        return _by_sorting(x, k=k)  # most chunks would be candidates
    if size <= ALL_PAIRS:
        return _by_rank(x, jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), x.shape), k)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % CHUNK)]
    chunks = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], -1, CHUNK)
    # A chunk that holds one of the k largest is preceded by fewer than k others.
    _, best = by_counting(jnp.max(chunks, axis=-1), k=k)
    candidates = jnp.take_along_axis(chunks, best[..., None], axis=-2)
    ids = best[..., None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    flat = (*x.shape[:-1], k * CHUNK)
    values, indices = _by_rank(candidates.reshape(flat), ids.reshape(flat), k)
    return values, jnp.minimum(indices, size - 1)  # a NaN must not bring in the padding


def _by_rank(x: Array, ids: Array, k: int) -> tuple[Array, Array]:
    """The k first of x [..., n] by value, then by id."""
    own, other = (x[..., :, None], ids[..., :, None]), (x[..., None, :], ids[..., None, :])
    precedes = (other[0] > own[0]) | ((other[0] == own[0]) & (other[1] < own[1]))
    rank = jnp.sum(precedes, axis=-1, dtype=jnp.int32)
    chosen = rank[..., None, :] == jnp.arange(k)[:, None]  # [..., k, n]
    values = jnp.max(jnp.where(chosen, x[..., None, :], -jnp.inf), axis=-1)
    return values, jnp.max(jnp.where(chosen, ids[..., None, :], 0), axis=-1)
