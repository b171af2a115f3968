"""Reductions over an axis that may be sharded, inside shard_map.

``axis`` is the mesh axis name that the last dimension is sharded over, or None when the array is
whole. Shard ``i`` of ``n`` holds entries ``i * size .. (i + 1) * size - 1``.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.top_k import top_k
from pallas_kernels.top_k.reference import local_top_k


def all_reduce(x: Array, axis: str | None) -> Array:
    """Sum over the shards."""
    return x if axis is None else lax.psum(x, axis)


def shard_offset(size: int, axis: str | None) -> Array | int:
    """Global index of this shard's first entry, for shards of ``size`` entries."""
    return 0 if axis is None else lax.axis_index(axis) * size


def maximum(x: Array, axis: str | None) -> Array:
    """x [..., V/n] -> [...]"""
    local = jnp.max(x, axis=-1)
    return local if axis is None else lax.pmax(local, axis)


def total(x: Array, axis: str | None) -> Array:
    """Sum of the last dimension: x [..., V/n] -> [...]"""
    return all_reduce(jnp.sum(x, axis=-1), axis)


def argmax(x: Array, axis: str | None) -> Array:
    """Global index of the maximum, the lowest one among equals: x [..., V/n] -> int32 [...]

    Always an index of x, even for a row with a NaN, which has no maximum: 0, or off the CPU the
    first NaN's, or where the collective drops NaN the lowest index of a NaN or of the maximum of
    the rest.

    A whole row is one reduction off the CPU, which reads it once.
    """
    if axis is None:
        return lax.platform_dependent(x, cpu=_local_argmax, default=one_reduction_argmax)
    return _local_argmax(x, axis)


def one_reduction_argmax(x: Array) -> Array:
    """argmax of a whole row off the CPU; a row with a NaN has the first one's index."""
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _local_argmax(x: Array, axis: str | None = None) -> Array:
    """argmax by two plain reductions: XLA's CPU backend runs jnp.argmax entry by entry, and
    whatever fuses into it too (4 times slower for noise)."""
    ids = jnp.arange(x.shape[-1], dtype=jnp.int32) + shard_offset(x.shape[-1], axis)
    best = maximum(x, axis)[..., None]
    # Not x == best: nothing equals NaN, but nothing is less than it either.
    index = jnp.min(jnp.where(x < best, jnp.iinfo(jnp.int32).max, ids), axis=-1)
    return index if axis is None else lax.pmin(index, axis)


def top_log_probs(x: Array, k: int, axis: str | None) -> tuple[Array, Array]:
    """The k largest log-probabilities and their global indices, the first of equals first.

    Float32 logits [..., V/n] -> ([..., k], int32 [..., k]). Sharded, only each shard's own k
    candidates cross the wire.
    """
    values, indices, log_sum = top_k(x, min(k, x.shape[-1]))
    if axis is not None:
        indices = indices + shard_offset(x.shape[-1], axis)
        values, indices = (
            lax.all_gather(a, axis, axis=a.ndim - 1, tiled=True) for a in (values, indices)
        )
        values, order = local_top_k(values, k)
        indices = jnp.take_along_axis(indices, order, axis=-1)
        log_sum = jax.nn.logsumexp(lax.all_gather(log_sum, axis), axis=0)
    return values - log_sum[..., None], indices


def log_softmax(x: Array, axis: str | None) -> Array:
    """x [..., V/n] -> [..., V/n]"""
    if axis is None:
        return jax.nn.log_softmax(x, axis=-1)
    shifted = x - maximum(x, axis)[..., None]
    return shifted - jnp.log(total(jnp.exp(shifted), axis))[..., None]


def take(x: Array, index: Array, axis: str | None) -> Array:
    """Entry at a global index: x [..., V/n], index [...] -> [...]"""
    size = x.shape[-1]
    local = index - shard_offset(size, axis)
    here = (local >= 0) & (local < size)
    value = jnp.take_along_axis(x, jnp.clip(local, 0, size - 1)[..., None], axis=-1)[..., 0]
    return all_reduce(jnp.where(here, value, jnp.zeros_like(value)), axis)


def one_hot(index: Array, size: int, axis: str | None) -> Array:
    """Where the last dimension's global index equals ``index``: [...] -> bool [..., V/n]"""
    ids = jnp.arange(size) + shard_offset(size, axis)
    return index[..., None] == ids
