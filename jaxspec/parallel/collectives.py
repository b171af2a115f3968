"""Sums over devices, and reductions over a vocabulary that may be split, inside shard_map.

``layout.vocab`` names the mesh axes that the last dimension is split over; () if it is not split.
Shard ``i`` of ``n`` holds entries ``i * size .. (i + 1) * size - 1``.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.parallel import Axes, Layout
from pallas_kernels.selection import Kernels
from pallas_kernels.top_k import top_k
from pallas_kernels.top_k.reference import local_top_k


def all_reduce(x: Array, axes: Axes) -> Array:
    """Sum over the shards of mesh axes ``axes``."""
    return lax.psum(x, axes) if axes else x


def reduce_scatter(x: Array, axes: Axes, dimension: int) -> Array:
    """Sum over the shards of ``axes``, of which each keeps its part of ``dimension``."""
    if not axes:
        return x
    return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)


def all_gather(x: Array, axes: Axes) -> Array:
    """The last dimension of all shards of ``axes``, one part after the other."""
    return lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) if axes else x


def padded_tokens(x: Array, axes: Axes) -> Array:
    """x [B, T, ...] with zeros after the tokens, so that the shards of ``axes`` can split them."""
    missing = -x.shape[1] % lax.axis_size(axes)
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))


def local_tokens(x: Array, axes: Axes) -> Array:
    """This shard's part of the tokens: x [B, n * T, ...] -> [B, T, ...]."""
    if not axes:
        return x
    size = x.shape[1] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=1)


def all_tokens(x: Array, axes: Axes, count: int | None = None) -> Array:
    """The tokens of all shards: x [B, T, ...] -> [B, count, ...]; None: [B, n * T, ...]."""
    if not axes:
        return x
    return lax.all_gather(x, axes, axis=1, tiled=True)[:, :count]


def shard_offset(size: int, axes: Axes) -> Array | int:
    """Global index of this shard's first entry, for shards of ``size`` entries."""
    return lax.axis_index(axes) * size if axes else 0


def maximum(x: Array, layout: Layout) -> Array:
    """Maximum of the last dimension: x [..., V/n] -> [...]"""
    local = jnp.max(x, axis=-1)
    return lax.pmax(local, layout.vocab) if layout.vocab else local


def total(x: Array, layout: Layout) -> Array:
    """Sum of the last dimension: x [..., V/n] -> [...]"""
    return all_reduce(jnp.sum(x, axis=-1), layout.vocab)


@dataclasses.dataclass(frozen=True)
class Reductions:
    """``total`` and ``maximum`` over one layout, hashable: a static argument."""

    layout: Layout

    def total(self, x: Array) -> Array:
        return total(x, self.layout)

    def maximum(self, x: Array) -> Array:
        return maximum(x, self.layout)


def all_finite(x: Array, layout: Layout) -> Array:
    """Whether the maximum of each row is finite: False for a row with NaN or +inf, and for a row of
    only -inf. x [..., V/n] -> bool [...]"""
    if not layout.vocab:
        return jnp.isfinite(jnp.max(x, axis=-1))
    local = jnp.max(x, axis=-1)
    # pmax may drop NaN, so the shards that have NaN or +inf are counted.
    broken = jnp.isnan(local) | (local == jnp.inf)
    counted = lax.psum(broken.astype(jnp.int32), layout.vocab)
    empty = lax.pmax(jnp.where(broken, 0.0, local), layout.vocab) == -jnp.inf
    return (counted == 0) & ~empty


def argmax(x: Array, layout: Layout) -> Array:
    """Global index of the maximum, the lowest among equals: x [..., V/n] -> int32 [...]

    The result is a valid index of x even for a row with NaN. It is then 0 on a CPU and for split
    rows, otherwise the index of the first NaN. If pmax drops NaN, a split row may give the lowest
    index of a NaN or of the maximum of the other entries.

    Rows that are not split are reduced in one step, except on a CPU, so they are read once.
    """
    if not layout.vocab:
        return lax.platform_dependent(x, cpu=_two_step_argmax, default=one_reduction_argmax)
    return _two_step_argmax(x, layout)


def finite_argmax(x: Array, logits: Array, layout: Layout) -> tuple[Array, Array]:
    """``argmax`` of x, and ``all_finite`` of its rows, with the reductions of one argmax.

    x [..., V/n] is ``logits`` plus finite noise. Except on a CPU, ``logits`` of a row that is not
    split are only read at the argmax: if the row has NaN, that is where argmax points.

    Returns (int32 [...], bool [...]); the index of a split row that is not finite is 0.
    """
    if layout.vocab:
        return _finite_argmax_of_shards(x, layout)
    index = argmax(x, layout)

    def whole(logits: Array, index: Array) -> Array:
        return all_finite(logits, layout)

    def at_index(logits: Array, index: Array) -> Array:
        return jnp.isfinite(jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0])

    return index, lax.platform_dependent(logits, index, cpu=whole, default=at_index)


def _finite_argmax_of_shards(x: Array, layout: Layout) -> tuple[Array, Array]:
    ids = jnp.arange(x.shape[-1], dtype=jnp.int32) + shard_offset(x.shape[-1], layout.vocab)
    local = jnp.max(x, axis=-1)
    best = lax.pmax(local, layout.vocab)
    index = jnp.min(jnp.where(x < best[..., None], jnp.iinfo(jnp.int32).max, ids), axis=-1)
    # pmax may drop NaN, so a shard that has NaN or +inf reports index -1, below all others.
    broken = jnp.isnan(local) | (local == jnp.inf)
    index = lax.pmin(jnp.where(broken, -1, index), layout.vocab)
    return jnp.maximum(index, 0), (index >= 0) & (best != -jnp.inf)


def one_reduction_argmax(x: Array) -> Array:
    """argmax of rows that are not split, on other devices than a CPU. With NaN: the first one."""
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _two_step_argmax(x: Array, layout: Layout = Layout()) -> Array:  # noqa: B008, it is frozen
    """argmax by two plain reductions. XLA's CPU backend does not vectorize jnp.argmax, nor what is
    fused into it (noise took 4 times as long)."""
    ids = jnp.arange(x.shape[-1], dtype=jnp.int32) + shard_offset(x.shape[-1], layout.vocab)
    best = maximum(x, layout)[..., None]
    # Not x == best: if best is NaN, no entry equals it, but none is less than it either.
    index = jnp.min(jnp.where(x < best, jnp.iinfo(jnp.int32).max, ids), axis=-1)
    return lax.pmin(index, layout.vocab) if layout.vocab else index


def top_log_probs(x: Array, k: int, layout: Layout, kernels: Kernels) -> tuple[Array, Array]:
    """The k largest log-probabilities and their global indices; of equals, lower indices first.

    Float32 logits [..., V/n] -> ([..., k], int32 [..., k]). If the vocabulary is split, shards
    exchange only their k best candidates.
    """
    values, indices, log_sum = _top(x, k, layout, kernels)
    if layout.vocab:
        log_sum = jax.nn.logsumexp(lax.all_gather(log_sum, layout.vocab), axis=0)
    return values - log_sum[..., None], indices


def top_logits(x: Array, k: int, layout: Layout, kernels: Kernels) -> tuple[Array, Array]:
    """``top_log_probs`` without the log-sum-exp of all logits, which differs between rows alone."""
    values, indices, _ = _top(x, k, layout, kernels)
    return values, indices


def _top(x: Array, k: int, layout: Layout, kernels: Kernels) -> tuple[Array, Array, Array]:
    """The k largest logits, their global indices, and this shard's log-sum-exp."""
    size, axes = x.shape[-1], layout.vocab
    values, indices, log_sum = top_k(x, min(k, size), kernels.implementation("top_k"))
    if axes:
        indices = indices + shard_offset(size, axes)
        values, indices = (all_gather(part, axes) for part in (values, indices))
        values, order = local_top_k(values, k)
        indices = jnp.take_along_axis(indices, order, axis=-1)
    return values, indices, log_sum


def log_sum_exp(x: Array, layout: Layout) -> Array:
    """log(sum(exp(x))) over the last dimension: x [..., V/n] -> [...]"""
    if not layout.vocab:
        return jax.nn.logsumexp(x, axis=-1)
    best = maximum(x, layout)
    return best + jnp.log(total(jnp.exp(x - best[..., None]), layout))


def log_softmax(x: Array, layout: Layout) -> Array:
    """log_softmax over the last dimension: x [..., V/n] -> [..., V/n]"""
    if not layout.vocab:
        return jax.nn.log_softmax(x, axis=-1)
    shifted = x - maximum(x, layout)[..., None]
    return shifted - jnp.log(total(jnp.exp(shifted), layout))[..., None]


def take(x: Array, index: Array, layout: Layout) -> Array:
    """Entry at a global index: x [..., V/n], index [...] -> [...]"""
    size = x.shape[-1]
    local = index - shard_offset(size, layout.vocab)
    here = (local >= 0) & (local < size)
    value = jnp.take_along_axis(x, jnp.clip(local, 0, size - 1)[..., None], axis=-1)[..., 0]
    return all_reduce(jnp.where(here, value, jnp.zeros_like(value)), layout.vocab)


def one_hot(index: Array, size: int, layout: Layout) -> Array:
    """Where the last dimension's global index equals ``index``: [...] -> bool [..., V/n]"""
    ids = jnp.arange(size) + shard_offset(size, layout.vocab)
    return index[..., None] == ids
