"""The product of a few rows with weights of 4-bit floats, which are read as they are stored.

It is packed_expert_product's with a single expert, which all rows choose: the same bytes in memory,
and the same kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.packed_expert_product import weights_misfit
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.packed_float_product.reference import packed_float_product_reference
from pallas_kernels.selection import Implementation, kernel_module

# More rows read and widen the weights again for every 64: beyond these XLA, which writes all of
# them to memory in bfloat16, moves about as many bytes. Not timed.
MOST_ROWS = 256


@jax.named_scope("packed_float_product")
def packed_float_product(
    x: Array,
    weights: PackedExperts,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Implementation = "reference",
) -> Array:
    """x [M, K] times weights [V, K] of 4-bit floats: [M, V].

    Args:
      weights: of a single expert, in one part.
      dtype: of the result; sums are float32.
      implementation: see selection.Implementation; for the Hopper kernel see ``misfit``.

    What a row gets does not depend on other rows. The kernel's weights are exact, where the
    reference rounds them to x's dtype.
    """
    mosaic = kernel_module("packed_float_product", implementation, misfit(x, weights))
    dtype = jnp.dtype(dtype)
    reference = functools.partial(packed_float_product_reference, dtype=dtype)
    if mosaic is None:
        return reference(x, weights)
    kernel = functools.partial(mosaic.packed_float_product_mosaic, dtype=dtype)
    return with_reference_gradient(kernel, reference)(x, weights)


def misfit(x: Array, weights: PackedExperts) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"rows of {x.dtype}: they must be bfloat16"
    if len(x) > MOST_ROWS:
        return f"{len(x)} rows: at most {MOST_ROWS}"
    if weights.code != "e2m1" or (weights.num_experts, weights.parts) != (1, 1):
        given = f"{weights.num_experts} experts of {weights.parts} parts in {weights.code}"
        return f"{given}: a single expert of one part in e2m1"
    return weights_misfit(weights)
