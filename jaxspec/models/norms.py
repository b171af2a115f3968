"""Root-mean-square norms in plain jnp, of dimensions that may be split over devices."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.parallel import Axes


@jax.named_scope("norm")
def rms_norm(x: Array, weight: Array | None, eps: float, axes: Axes = ()) -> Array:
    """Root-mean-square norm over the last dimension, in float32. No weight: identity.

    ``axes``: mesh axes that the last dimension is split over.
    """
    if weight is None:
        return x
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    if axes:  # all devices have as many
        mean = lax.pmean(mean, axes)
    return (wide * lax.rsqrt(mean + eps)).astype(x.dtype) * weight


@jax.named_scope("norm")
def unweighted_norm(x: Array, eps: float) -> Array:
    """Root-mean-square norm over the last dimension, which is not split, in float32; it has no
    weight."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + eps)).astype(x.dtype)


@jax.named_scope("norm")
def layer_norm(
    x: Array, weight: Array | None, eps: float, axes: Axes = (), bias: Array | None = None
) -> Array:
    """rms_norm of what is left when the mean over the last dimension is subtracted. No weight:
    identity. ``bias``: is added to it."""
    if weight is None:
        return x
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    if axes:  # all devices have as many
        mean = lax.pmean(mean, axes)
    normed = rms_norm(wide - mean, weight.astype(jnp.float32), eps, axes)
    if bias is not None:
        normed = normed + bias.astype(jnp.float32)
    return normed.astype(x.dtype)


@jax.named_scope("norm")
def norm_all_heads(qkv: Array, weight: Array, eps: float, axes: Axes) -> Array:
    """The heads [B, T, G, R, D] of a qkv projection, with all queries normed as one vector, and all
    keys as another; values stay.

    Args:
      weight: [G, R - 1, D] of the queries, then of the key.
      axes: mesh axes that KV heads are split over. A head that several devices repeat counts as
        often on each, which does not change the mean.
    """
    wide = qkv.astype(jnp.float32)
    squares = wide * wide
    parts = []
    for part in (slice(0, -2), slice(-2, -1)):
        mean = jnp.mean(squares[..., part, :], axis=(-3, -2, -1), keepdims=True)
        scale = lax.rsqrt((lax.pmean(mean, axes) if axes else mean) + eps)
        parts.append((wide[..., part, :] * scale).astype(qkv.dtype))
    normed = jnp.concatenate(parts, axis=-2) * weight
    return jnp.concatenate([normed, qkv[..., -1:, :]], axis=-2)


def norms_before_rope(q_norm: Array, k_norm: Array) -> tuple[Array, Array]:
    """What stands for norms [D] of rotated queries and keys: the weight of the norms of both before
    they are rotated, and float32 [D] that rotated queries are multiplied by.

    A rotation keeps the size of a head, so it may come before or after the division by it, but not
    after the product with weights. Of these only the product of a query's and a key's counts.
    """
    return jnp.ones_like(q_norm), q_norm.astype(jnp.float32) * k_norm.astype(jnp.float32)
