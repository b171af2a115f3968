"""Products of rows with weights of 4-bit floats, in plain jnp."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.products import input_last_product


def packed_float_product_reference(
    x: Array,  # [M, K]
    weights: PackedExperts,
    *,
    dtype: jnp.dtype,
) -> Array:
    """See pallas_kernels.packed_float_product.packed_float_product.

    Weights are widened in float32; then they are rounded to x's dtype.
    """
    wide = weights.of(jnp.zeros((), jnp.int32))[0]
    return input_last_product(x, wide.astype(x.dtype), dtype)
