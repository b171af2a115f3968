"""The specification of packed_product in jnp; it runs where the kernel does not."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.products import einsum_f32


def packed_product_reference(
    x: Array, values: Array, scale: Array, zero: Array | None, num_splits: int
) -> Array:
    """See pallas_kernels.packed_product.packed_product.

    Weights are exact in float32: a difference of 4-bit integers has 5 bits, a 16-bit scale at most
    11. Only the sums are rounded.
    """
    return dense_product(x.astype(jnp.float32), values, scale, zero, num_splits)


def dense_product(
    x: Array, values: Array, scale: Array, zero: Array | None, num_splits: int
) -> Array:
    """The same with weights rounded to x's dtype: what XLA does best, and is timed beside."""
    rows = x.reshape(len(x), num_splits, -1)
    weights = dequantized(values, scale, zero).astype(x.dtype)
    by_split = weights.reshape(len(values), num_splits, -1)
    return einsum_f32("msk,nsk->smn", rows, by_split)


def dequantized(values: Array, scale: Array, zero: Array | None) -> Array:
    """(values - zero) * scale in float32: [out, in]."""
    out, groups = scale.shape
    integers = values.astype(jnp.float32).reshape(out, groups, -1)
    if zero is not None:
        integers -= zero.astype(jnp.float32)[..., None]
    return (integers * scale.astype(jnp.float32)[..., None]).reshape(out, -1)
