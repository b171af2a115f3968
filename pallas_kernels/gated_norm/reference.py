"""Gated norms by heads in plain jnp."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def gated_norm_reference(x: Array, projected: Array, norm: Array, eps: float) -> Array:
    """See pallas_kernels.gated_norm.gated_norm."""
    rows, groups, heads, size = x.shape
    gates = projected[..., projected.shape[-1] - heads * size :]
    gates = gates.reshape(x.shape).astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    out = x * scale * norm * jax.nn.silu(gates)
    return out.astype(projected.dtype).reshape(rows, groups * heads * size)
