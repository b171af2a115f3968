"""The specification of add_rms_norm in jnp; it runs where the kernel does not."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.products import sum_partials


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last dimension, in float32: x [..., H], weight [H]."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


def add_rms_norm_reference(
    x: Array,
    partials: Array | ChosenProducts,
    weight: Array,
    eps: float,
    beside: Array | None = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm."""
    if isinstance(partials, ChosenProducts):
        added = partials.total().astype(x.dtype).reshape(x.shape)
    else:
        added = sum_partials(partials, len(x), x.dtype)
    total = x + added
    return total, followed_by(rms_norm(total, weight, eps), beside)


def followed_by(x: Array, beside: Array | None) -> Array:
    """The rows of x [B, T, ...] and those of ``beside`` [1, R, ...] after them, as those of one
    sequence: [1, B * T + R, ...]; x if there are none."""
    if beside is None:
        return x
    return jnp.concatenate([x.reshape(1, -1, *beside.shape[2:]), beside], axis=1)
