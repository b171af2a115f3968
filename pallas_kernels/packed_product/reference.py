"""The specification of packed_product in jnp; it runs where the kernel does not."""

import jax
import jax.numpy as jnp
from jax import Array


def packed_product_reference(
    x: Array, values: Array, scale: Array, zero: Array | None, num_splits: int
) -> Array:
    """See pallas_kernels.packed_product.packed_product.

    Weights are exact in float32: a difference of 4-bit integers has 5 bits, a 16-bit scale at most
    11. Only the sums are rounded.
    """
    rows = x.astype(jnp.float32).reshape(len(x), num_splits, -1)
    weights = dequantized(values, scale, zero).reshape(len(values), num_splits, -1)
    dimensions = (((2,), (2,)), ((1,), (1,)))
    return jax.lax.dot_general(rows, weights, dimensions, precision=jax.lax.Precision.HIGHEST)


def dequantized(values: Array, scale: Array, zero: Array | None) -> Array:
    """(values - zero) * scale in float32: [out, in]."""
    out, groups = scale.shape
    integers = values.astype(jnp.float32).reshape(out, groups, -1)
    if zero is not None:
        integers -= zero.astype(jnp.float32)[..., None]
    return (integers * scale.astype(jnp.float32)[..., None]).reshape(out, -1)
