"""The product of a few rows with weights of 4 bits, which are widened where they are used."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.packed_product.reference import packed_product_reference
from pallas_kernels.packed_product.tuning import OUTPUTS, packed_tuning
from pallas_kernels.selection import Implementation, kernel_module

MOST_ROWS = 64  # more are faster with widened weights: see docs/kernels.md
BLOCKS = (64, 128)  # inputs of a block; a group has as many, or a multiple of 128


@jax.named_scope("packed_product")
def packed_product(
    x: Array,
    values: Array,
    scale: Array,
    zero: Array | None = None,
    *,
    num_splits: int = 1,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Implementation = "reference",
) -> Array:
    """Multiply x with the weights (values - zero) * scale.

    Args:
      x: [M, K]
      values: signed integers of 4 bits [V, K].
      scale: float [n, V], of each output and each of n groups of consecutive inputs.
      zero: whole numbers, as ``scale``; None: all 0.
      num_splits: parts of K that are summed separately; it divides K into whole groups, or groups
        into whole parts.
      dtype: of the result.
      implementation: "auto" takes the Hopper kernel where it fits (bfloat16 x of at most 64 rows,
        groups of 64 or multiples of 128, V a multiple of 128), else the reference.

    Returns [num_splits, M, V]; summed in float32.

    Raises ValueError if ``implementation`` is "mosaic_gpu" and the kernel cannot take the
    arguments.
    """
    problem = misfit(x, values, scale, num_splits)
    mosaic = kernel_module("packed_product", implementation, problem)
    options = {"num_splits": num_splits, "dtype": jnp.dtype(dtype)}
    reference = functools.partial(packed_product_reference, **options)
    if mosaic is None:
        return reference(x, values, scale, zero)
    kernel = functools.partial(mosaic.packed_product_mosaic, **options)
    return with_reference_gradient(kernel, reference)(x, values, scale, zero)


def misfit(x: Array, values: Array, scale: Array, num_splits: int = 1) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    (rows, depth), (groups, width) = x.shape, scale.shape
    if x.dtype != jnp.bfloat16 or values.dtype != jnp.int4 or scale.dtype.itemsize != 2:
        given = f"{x.dtype} x, {values.dtype} values and {scale.dtype} scales"
        return f"{given}: they must be bfloat16, int4, and of 16 bits"
    if rows > MOST_ROWS:
        return f"{rows} rows: at most {MOST_ROWS}"
    tile = OUTPUTS * packed_tuning(rows, depth, width).warpgroups
    if width % tile:
        return f"{width} outputs: a multiple of {tile}"
    group = depth // groups
    if group not in BLOCKS and group % BLOCKS[-1]:
        return f"groups of {group} inputs: {BLOCKS[0]}, or a multiple of {BLOCKS[-1]}"
    if depth % (num_splits * min(group, BLOCKS[-1])):
        return f"{depth} inputs in {num_splits} parts: they must be whole blocks"
    return None
