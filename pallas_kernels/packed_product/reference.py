"""The product with weights of a few bits in plain jnp."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.packed_product.order import kernel_order


def packed_product_reference(
    x: Array,  # [M, K]
    values: Array,  # [V, K]; int4 in the order of order.py for x's bits
    scale: Array,  # [n, V]
    zero: Array | None,  # [n, V]
    x_scale: Array | None = None,  # [n or 1, M or more]
    *,
    num_splits: int,
    dtype: jnp.dtype,
) -> Array:
    """See pallas_kernels.packed_product.packed_product."""
    weights = dequantized(values, scale, zero).reshape(len(values), num_splits, -1)
    wide = x.astype(jnp.float32)
    if x_scale is not None:
        wide = dequantized(x, x_scale[:, : len(x)])
    if values.dtype == jnp.int4:
        wide = kernel_order(wide, 16 if x_scale is None else 8)
    rows = wide.reshape(len(x), num_splits, -1)
    sums = jnp.einsum("msk,vsk->smv", rows, weights, precision=jax.lax.Precision.HIGHEST)
    return sums.astype(dtype)


@jax.jit  # outside of a program this is one
def dequantized(values: Array, scale: Array, zero: Array | None = None) -> Array:
    """Float32 weights [V, K] of values [V, K], and scale and zero [n, V]: (values - zero) * scale.

    Each of n groups of consecutive inputs has a scale and a zero.
    """
    by_group = values.astype(jnp.float32).reshape(len(values), len(scale), -1)  # [V, n, K / n]
    if zero is not None:
        by_group = by_group - zero.astype(jnp.float32).T[..., None]
    return (by_group * scale.astype(jnp.float32).T[..., None]).reshape(values.shape)
