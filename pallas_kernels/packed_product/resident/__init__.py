"""A second kernel of packed_product for int4 weights: rows of x stay in shared memory.

Timed beside the first one (``bench kernels --only resident``); nothing chooses it yet, and it never
ran on a GPU. What differs: a CTA loads its part of x once and then takes several tiles of outputs
in turns, so that its ring of weights never runs dry between them; weights are widened without
moving any between threads, because x is stored in the order in which threads find them; and the
weights of a group are widened while those of the group before are multiplied.
"""

from jax import Array

from pallas_kernels.packed_product.resident.plan import Plan
from pallas_kernels.packed_product.resident.tuning import (
    BLOCK,
    DEFAULT,
    MOST_ROWS,
    TILE,
    choose_num_splits,
    fits,
    padded_rows,
)

__all__ = ["choose_num_splits", "misfit"]


def misfit(
    x: Array, values: Array, scale: Array, zero: Array | None, num_splits: int
) -> str | None:
    """Why the kernel cannot take these arguments of packed_product, None if it can."""
    (rows, depth), (groups, width) = x.shape, scale.shape
    if x.dtype != "bfloat16" or values.dtype != "int4" or scale.dtype.itemsize != 2:
        given = f"{x.dtype} x, {values.dtype} values and {scale.dtype} scales"
        return f"{given}: they must be bfloat16, int4, and of 16 bits"
    if not 0 < rows <= MOST_ROWS:
        return f"{rows} rows: from 1 to {MOST_ROWS}"
    if width % TILE or depth % BLOCK:
        return f"{depth} inputs and {width} outputs: multiples of {BLOCK} and {TILE}"
    group = depth // groups
    if group < 32 or (BLOCK % group and group % BLOCK):
        return f"groups of {group} inputs: 32, 64, 128, or multiples of {BLOCK}"
    if not fits(padded_rows(rows), depth, num_splits):
        return f"{num_splits} parts of {depth} inputs and {rows} rows: see choose_num_splits"
    if depth // num_splits % group and group % (depth // num_splits):
        return f"{num_splits} parts of {depth} inputs: they must be whole groups, or parts of one"
    plan = Plan(
        rows=rows,
        depth=depth,
        width=width,
        num_groups=groups,
        zeros=zero is not None,
        splits=num_splits,
        scale_dtype=scale.dtype,
        config=DEFAULT,
        interpret=False,
    )
    if not plan.stages:
        return f"{groups} groups: scales of a part of the inputs leave no shared memory to weights"
    return None
