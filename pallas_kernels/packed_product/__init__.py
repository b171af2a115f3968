"""The product of a few rows with weights of 4 or 8 bits, which are read as they are stored."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import FLOAT8
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.packed_product.reference import packed_product_reference
from pallas_kernels.packed_product.tuning import (
    LARGEST_STEP,
    SCALED_ROWS,
    SUMMED_ROWS,
    packed_tuning,
    scaled_rows,
)
from pallas_kernels.selection import Implementation, kernel_module

MOST_ROWS = 1024  # with weights of 4 bits; more were not timed
SMALL_GROUPS = (32, 64)  # of inputs that share a scale; larger ones are multiples of 128


@jax.named_scope("packed_product")
def packed_product(
    x: Array,
    values: Array,
    scale: Array,
    zero: Array | None = None,
    x_scale: Array | None = None,
    *,
    num_splits: int = 1,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Implementation = "reference",
) -> Array:
    """Multiply x with the weights (values - zero) * scale.

    Args:
      x: [M, K], bfloat16 or e4m3; e4m3 if the weights are.
      values: signed integers of 4 bits, with inputs in the order of ``order.kernel_order`` for x's
        bits; or e4m3 numbers: [V, K].
      scale: float [n, V], of each output and each of n groups of consecutive inputs.
      zero: whole numbers, as ``scale``; None: all 0.
      x_scale: float32 [n or 1, M or more], of each row of x and each group: x stands for
        x * x_scale. None: all 1.
      num_splits: parts of K that are summed separately; it divides K into whole groups, or groups
        into whole parts.
      dtype: of the result.
      implementation: "auto" takes the Hopper kernel where it fits, else the reference. V must be a
        multiple of the tile of tuning.py, and one of these must hold:
        - bfloat16 x of at most 1024 rows, int4 weights, groups of 32, 64 or multiples of 128;
        - e4m3 x of at most 1024 rows with one scale a row, int4 weights without zeros;
        - e4m3 x of at most 64 rows, e4m3 weights with as many groups.
        With e4m3 x groups are multiples of 128, and x_scale is padded to a multiple of 32 rows.

    Returns [num_splits, M, V]; summed in float32. For more than 64 rows of bfloat16 the kernel
    rounds scaled weights to bfloat16.
    """
    problem = misfit(x, values, scale, x_scale, num_splits, has_zero=zero is not None)
    mosaic = kernel_module("packed_product", implementation, problem)
    options = {"num_splits": num_splits, "dtype": jnp.dtype(dtype)}
    reference = functools.partial(packed_product_reference, **options)
    if mosaic is None:
        return reference(x, values, scale, zero, x_scale)
    kernel = functools.partial(mosaic.packed_product_mosaic, **options)
    if x_scale is not None:
        return kernel(x, values, scale, zero, x_scale)
    return with_reference_gradient(kernel, reference)(x, values, scale, zero)


def misfit(
    x: Array,
    values: Array,
    scale: Array,
    x_scale: Array | None = None,
    num_splits: int = 1,
    *,
    has_zero: bool = False,
) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    (rows, depth), (groups, width) = x.shape, scale.shape
    if x_scale is not None:
        if x.dtype != FLOAT8 or values.dtype not in (FLOAT8, jnp.int4):
            return f"scales of {x.dtype} x and {values.dtype} values: e4m3, and e4m3 or int4"
        weight_bits = 8 if values.dtype == FLOAT8 else 4
        x_groups = 1 if weight_bits == 4 else groups
        if x_scale.shape != (x_groups, scaled_rows(rows)):
            return f"scales of x {x_scale.shape}: padded to a multiple of {SCALED_ROWS} rows"
        if has_zero:
            return "zeros of weights, and scales of x"
        return sizes_misfit(rows, depth, width, groups, num_splits, weight_bits)
    if x.dtype != jnp.bfloat16 or values.dtype != jnp.int4 or scale.dtype.itemsize != 2:
        given = f"{x.dtype} x, {values.dtype} values and {scale.dtype} scales"
        return f"{given}: they must be bfloat16, int4, and of 16 bits"
    return sizes_misfit(rows, depth, width, groups, num_splits, weight_bits=4, x_bits=16)


def sizes_misfit(
    rows: int,
    depth: int,
    width: int,
    groups: int,
    num_splits: int = 1,
    weight_bits: int = 8,
    x_bits: int = 8,
) -> str | None:
    """Why the kernel cannot multiply rows with weights of these sizes, None if it can."""
    group = depth // groups
    most_rows = SUMMED_ROWS if weight_bits == 8 else MOST_ROWS
    if rows > most_rows:
        return f"{rows} rows: at most {most_rows}"
    tile = packed_tuning(rows, depth, width, weight_bits, x_bits).tile
    if width % tile:
        return f"{width} outputs: a multiple of {tile}"
    small_groups = SMALL_GROUPS if x_bits == 16 else ()
    if group not in small_groups and group % LARGEST_STEP:
        allowed = ", ".join([*map(str, small_groups), f"multiples of {LARGEST_STEP}"])
        return f"groups of {group} inputs: {allowed}"
    if depth % (num_splits * LARGEST_STEP):
        return f"{depth} inputs in {num_splits} parts: multiples of {LARGEST_STEP}"
    return None
