"""Blocks of weights and x in the shared memory of Hopper GPUs: copied into a ring, and multiplied.

What the kernels with weights of 4 or 8 bits have in common. ``refs`` are the arrays of
``ring_scratch``, by name.
"""

from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.packed_product.plan import ProductPlan
from pallas_kernels.packed_product.tuning import OUTPUTS, scaled_rows
from pallas_kernels.packed_product.widening import (
    BIAS,
    FLOAT8_STEP,
    biased_weights,
    float8_weights,
)
from pallas_kernels.shared_memory import LINE, swizzled

_OUTPUT_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # one value for each output of a warpgroup
_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # one value for each row of x


def ring_scratch(plan: ProductPlan, dtype: Any, scale_dtype: Any) -> dict[str, Any]:
    """The ring and its barriers, for x of ``dtype`` and weights with scales of ``scale_dtype``."""
    block, ring, bits = plan.block, plan.stages, 8 * dtype.itemsize
    by_output = (ring, plan.tile // plan.part, plan.block_groups, plan.part)
    x_tile = min(8 * LINE // bits, plan.unit)
    values_dtype = dtype if plan.weight_bits == 8 else jnp.int4
    values_transforms = swizzled(block, plan.weight_bits)
    scratch: dict[str, Any] = {
        "values": plgpu.SMEM((ring, plan.tile, block), values_dtype, transforms=values_transforms),
        "x": plgpu.SMEM((ring, plan.tile_rows, block), dtype, transforms=swizzled(x_tile, bits)),
        "full": plgpu.Barrier(num_arrivals=plan.copies, num_barriers=ring),
        "free": plgpu.Barrier(num_arrivals=plan.config.warpgroups, num_barriers=ring),
    }
    by_row = (ring, plan.block_groups, scaled_rows(plan.rows))
    for name in plan.by_step:
        by_outputs = plgpu.SMEM(by_output, scale_dtype)
        scratch[name] = plgpu.SMEM(by_row, jnp.float32) if name == "x_scale" else by_outputs
    return scratch


def copy_block(
    plan: ProductPlan,
    x: Any,
    values: Any,
    scales: dict[str, Any],
    refs: Any,
    tile: Array,
    block: Array,
) -> None:
    """Copy a block of inputs, of a tile's weights and of all rows, into ``refs`` of its slot.

    ``scales``: the weights' scales and zeros, and x_scale, by name.
    """
    tile_size, full = plan.tile, refs["full"]
    outputs, inputs = pl.ds(tile * tile_size, tile_size), pl.ds(block * plan.block, plan.block)
    rows = own_rows(plan)  # the copy engine writes zeros for rows that are not there
    groups = pl.ds(block * plan.block // plan.group, plan.block_groups)
    plgpu.copy_gmem_to_smem(values.at[outputs, inputs], refs["values"], full)
    plgpu.copy_gmem_to_smem(x.at[rows, inputs], refs["x"], full)
    for name in plan.by_step:
        if name == "x_scale":
            of_rows = scales[name].at[groups, pl.ds(0, scaled_rows(plan.rows))]
            plgpu.copy_gmem_to_smem(of_rows, refs[name], full)
            continue
        for part in range(tile_size // plan.part):
            scale_outputs = pl.ds(tile * tile_size + part * plan.part, plan.part)
            plgpu.copy_gmem_to_smem(
                scales[name].at[groups, scale_outputs], refs[name].at[part], full
            )


def no_sums(plan: ProductPlan) -> Array:
    """Float32 zeros [OUTPUTS, rows], which ``add_block`` adds to."""
    zeros = jnp.zeros((OUTPUTS, plan.tile_rows), jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def add_block(plan: ProductPlan, refs: Any, outputs: Any, slot: Array, total: Array) -> Array:
    """total + the product of the block in ``slot``, whose sums are scaled step by step.

    ``outputs``: the warpgroup's outputs. Totals are [OUTPUTS, rows]. Frees the slot.
    """
    weights = None
    plgpu.barrier_wait(refs["full"].at[slot])
    for start in range(0, plan.block, plan.step):
        group = start // plan.group
        sums, weights = _product(plan, refs, slot, outputs, start, weights)
        if "x_scale" in plan.by_step:
            x_scales = refs["x_scale"].at[slot, group, pl.ds(_first_row(plan), plan.tile_rows)]
            x_scale = plgpu.load(x_scales, layout=_ROW_LAYOUT, optimized=False)
            sums *= lax.broadcast_in_dim(x_scale, sums.shape, [1])
        scale = _by_output(plan, refs["scale"], slot, group).astype(jnp.float32)
        total += sums * lax.broadcast_in_dim(scale, sums.shape, [0])
    plgpu.commit_smem()  # what was read comes before what the copy engine writes there next
    plgpu.barrier_arrive(refs["free"].at[slot])
    return total


def scaled_by_row(total: Array, x_scale: Any, rows: Any) -> Array:
    """Sums [OUTPUTS, rows] of weights that were widened to 8-bit floats, times the rows' scales."""
    row_scale = plgpu.load(x_scale.at[0, rows], layout=_ROW_LAYOUT, optimized=False)
    return total * lax.broadcast_in_dim(row_scale, total.shape, [1]) * (1 / FLOAT8_STEP)


def own_rows(plan: ProductPlan) -> Any:
    """A CTA's rows of x and of the result, which may have fewer: a start that is not known keeps
    the slice from being checked."""
    return pl.ds(_first_row(plan) + 0 * kernel_axes.index("tile"), plan.tile_rows)


def _first_row(plan: ProductPlan) -> Any:
    return kernel_axes.index("part") * plan.tile_rows if plan.row_parts > 1 else 0


def own_outputs() -> Any:
    """A warpgroup's outputs among those of its CTA."""
    return pl.ds(kernel_axes.index("warpgroup") * OUTPUTS, OUTPUTS)


def _product(
    plan: ProductPlan, refs: Any, slot: Array, outputs: Any, start: int, weights: Any
) -> tuple[Array, Any]:
    """The weights of a step times x: float32 [OUTPUTS, rows].

    ``weights``: the step's first ones, if they are widened already. Also returns those of the next
    step, or None.
    """
    starts = range(start, start + plan.step, plan.unit)
    if plan.interpret:
        return interpreted(plan, refs, slot, outputs, starts), None

    def multiply(sums: Any) -> tuple[Array, Any]:
        following = accumulate(plan, refs, slot, outputs, starts, sums, weights)
        return sums[...], following

    sums = plgpu.WGMMAAccumulatorRef((OUTPUTS, plan.tile_rows), jnp.float32)
    return pl.run_scoped(multiply, sums)


def accumulate(
    plan: ProductPlan,
    refs: Any,
    slot: Array,
    outputs: Any,
    starts: Sequence[int],
    sums: Any,
    weights: Any = None,
) -> Any:
    """Add the products of the units that begin at ``starts``; ``weights`` as in ``_product``."""
    for first in starts:
        if weights is None:
            weights = _weights(plan, refs, slot, outputs, first)
        plgpu.wgmma(sums, weights, _x(plan, refs, slot, first))
        following = first + plan.unit
        widens = plan.config.ahead and plan.weight_bits == 4 and following < plan.block
        weights = _weights(plan, refs, slot, outputs, following) if widens else None
        plgpu.wgmma_wait(0)  # the registers of these weights are free for the next ones
    return weights


def interpreted(
    plan: ProductPlan, refs: Any, slot: Array, outputs: Any, starts: Sequence[int]
) -> Array:
    """The same: the interpreter knows no operands in registers, and CPUs no 8-bit floats."""
    total = jnp.zeros((OUTPUTS, plan.tile_rows), jnp.float32)
    for first in starts:
        weights = _weights(plan, refs, slot, outputs, first)[...].astype(jnp.float32)
        weights = lax.reduce_precision(weights, 8, 7)  # XLA may leave out a rounding to bfloat16
        x = _x(plan, refs, slot, first)[...].astype(jnp.float32)
        total += jnp.dot(weights, x, precision=lax.Precision.HIGHEST)
    return total


def _weights(plan: ProductPlan, refs: Any, slot: Array, outputs: Any, start: int) -> Any:
    """A unit of them: [OUTPUTS, unit]."""
    values = refs["values"].at[slot, outputs]
    if plan.weight_bits == 8:
        return values.at[:, pl.ds(start, plan.unit)]
    if plan.widens_to_float8:
        return float8_weights(values, start, plan.unit, interpret=plan.interpret)
    return _widened(plan, refs, slot, outputs, start)


def _x(plan: ProductPlan, refs: Any, slot: Array, start: int) -> Any:
    """[unit, rows]"""
    return refs["x"].at[slot, :, pl.ds(start, plan.unit)].transpose((1, 0))


def _widened(plan: ProductPlan, refs: Any, slot: Array, outputs: Any, start: int) -> Array:
    """Weights of 4 bits less their zeros, exactly, or scaled: bfloat16 [OUTPUTS, unit]."""
    values = refs["values"].at[slot, outputs]
    biased = biased_weights(values, start, plan.unit, interpret=plan.interpret)
    bias = jnp.bfloat16(BIAS)
    if "zero" in plan.by_step:
        zero = _by_output(plan, refs["zero"], slot, start // plan.group)
        bias = lax.broadcast_in_dim(zero.astype(jnp.bfloat16) + bias, biased.shape, [0])
    weights = biased - bias
    if not plan.scales_weights:
        return weights
    scale = _by_output(plan, refs["scale"], slot, start // plan.group)
    dtype = jnp.promote_types(weights.dtype, scale.dtype)  # float32 if scales are float16
    scale = lax.broadcast_in_dim(scale.astype(dtype), weights.shape, [0])
    return (weights.astype(dtype) * scale).astype(weights.dtype)


def _by_output(plan: ProductPlan, ref: Any, slot: Array, group: int) -> Array:
    """A warpgroup's scales or zeros of a group."""
    first = kernel_axes.index("warpgroup") * OUTPUTS
    outputs = pl.ds(lax.rem(first, plan.part), OUTPUTS)
    place = ref.at[slot, lax.div(first, plan.part), group, outputs]
    return plgpu.load(place, layout=_OUTPUT_LAYOUT, optimized=False)


def store_rows(total: Array, place: Any, rows: Any) -> None:
    """Store a warpgroup's outputs [OUTPUTS, rows] as rows of ``place``, through ``rows``: shared
    memory of all warpgroups. The copy is under way yet, but has read them there."""
    warpgroup_rows = rows.at[kernel_axes.index("warpgroup")]
    transposed = plgpu.layout_cast(
        total.astype(warpgroup_rows.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    write_plain(warpgroup_rows.transpose((1, 0)), transposed)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(warpgroup_rows, place)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def write_plain(ref: Any, value: Array) -> None:
    """Store to plain shared memory. jax 0.12 has to be told that bank conflicts are allowed."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
