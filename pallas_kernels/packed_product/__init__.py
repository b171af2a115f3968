"""The product of few rows with weights of 4 bits, whose scales are shared by groups of inputs."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.packed_product.reference import packed_product_reference
from pallas_kernels.packed_product.tuning import (
    BLOCK,
    MOST_ROWS,
    TILE,
    choose_num_splits,
    fits,
    padded_rows,
)
from pallas_kernels.selection import Implementation, kernel_module

__all__ = ["MOST_ROWS", "choose_num_splits", "misfit", "packed_product"]

SCALES = (jnp.bfloat16, jnp.float16)
GROUPS_STEP = 8  # TMA copies scales of 8 groups, 16 bytes, at a time


@jax.named_scope("packed_product")
def packed_product(
    x: Array,
    values: Array,
    scale: Array,
    zero: Array | None = None,
    *,
    num_splits: int = 1,
    implementation: Implementation = "reference",
) -> Array:
    """Multiply rows with the weights (values - zero) * scale, which stay packed in memory.

    Args:
      x: [M, in]
      values: int4 [out, in]
      scale: [out, in / group]
      zero: integers of -8..7 in any dtype, [out, in / group]; None: 0. The kernel reads them in
        bfloat16: in another dtype they are converted in every call.
      num_splits: the number of partial sums; each covers in / num_splits consecutive inputs. See
        ``choose_num_splits``: the kernel keeps a split's part of x in shared memory, and cannot
        take all of it where in is large.
      implementation: "auto" takes the Hopper kernel where it fits (see ``misfit``), else the
        reference.

    Returns float32 [num_splits, M, out]: split-K partial sums; their sum is the product.
    Products of integers with rows are exact before they are summed; a group's sum is multiplied by
    the group's scale, in float32. So a row's result depends on its own numbers, on ``num_splits``
    and on ``tuning.padded_rows(M)`` only. The error of a partial sum of K inputs is at most
    2^-22 (K / 16 + K / group + 1) times the sum of its products' magnitudes.

    Raises ValueError for inputs that cannot be split evenly, and if ``implementation`` is
    "mosaic_gpu" and the kernel cannot take the arguments.
    """
    if x.shape[-1] % num_splits:
        raise ValueError(f"{x.shape[-1]} inputs cannot be split evenly in {num_splits}")
    reference = functools.partial(packed_product_reference, num_splits=num_splits)
    problem = misfit(x, values, scale, num_splits)
    mosaic = kernel_module("packed_product", implementation, problem)
    if mosaic is None:
        return reference(x, values, scale, zero)
    kernel = functools.partial(mosaic.packed_product_mosaic, num_splits=num_splits)
    return with_reference_gradient(kernel, reference)(x, values, scale, zero)


def misfit(x: Array, values: Array, scale: Array, num_splits: int) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    (rows, depth), (width, groups) = x.shape, scale.shape
    if x.dtype != jnp.bfloat16 or values.dtype != jnp.int4 or scale.dtype not in SCALES:
        return (
            f"{x.dtype} rows, {values.dtype} weights and {scale.dtype} scales: they must be "
            "bfloat16, int4 and of 16 bits"
        )
    if not 0 < rows <= MOST_ROWS:
        return f"{rows} rows: from 1 to {MOST_ROWS}"
    if width % TILE or depth % BLOCK:
        return f"{depth} inputs and {width} outputs: multiples of {BLOCK} and {TILE}"
    if not takes_groups(depth, groups):
        return (
            f"{groups} groups of {depth} inputs: 1, or a multiple of {GROUPS_STEP} of 32, 64, ..."
        )
    if not fits(padded_rows(rows), depth, num_splits):
        return f"{num_splits} splits of {depth} inputs and {rows} rows: see choose_num_splits"
    return None


def takes_groups(depth: int, groups: int) -> bool:
    """Whether the kernel takes groups of such a size: 32, 64, 128, multiples of 256, or all."""
    group = depth // groups
    whole = BLOCK % group == 0 if group < BLOCK else group % BLOCK == 0
    return groups == 1 or (group >= 32 and whole and groups % GROUPS_STEP == 0)
