"""The product with weights of 4 or 8 bits on Hopper GPUs.

Weights are the first operand of the tensor cores (64 outputs a warpgroup), and rows of x the second
one: so a product of few rows fills them. Weights of 4 bits are widened in registers to the dtype of
x (bfloat16, or 8-bit floats); floats of 8 bits are multiplied as they are. A warpgroup copies
blocks of weights, x and scales into a ring; the others multiply.

Scales multiply the sums of a step (a group's inputs, or 128 of a larger group's), not the weights.
So sums of 8-bit floats, which tensor cores keep with fewer bits, are short, and a row's sums depend
neither on the other rows nor on the size of blocks. Where rows of 8 bits meet weights of 4, a row's
one scale multiplies at the end.

With more than SUMMED_ROWS rows of bfloat16 registers hold one sum of each output only: then weights
are scaled and rounded to bfloat16, as in a product with widened weights.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.packed_product.blocks import (
    accumulate,
    add_block,
    copy_block,
    interpreted,
    no_sums,
    own_outputs,
    own_rows,
    ring_scratch,
    scaled_by_row,
    store_rows,
)
from pallas_kernels.packed_product.plan import ProductPlan
from pallas_kernels.packed_product.tuning import (
    OUTPUTS,
    PackedTuning,
    packed_tuning,
)

# Of a thread that copies, where those that multiply take more. A CTA of three warpgroups has 168 a
# thread at first. Two with 240 and one with 24 need no more; with more they would wait forever.
COPYING_REGISTERS = 24
SCALES = ("scale", "zero", "x_scale")  # arguments beside x and the weights; scale and zero [n, V]


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("num_splits", "dtype", "config", "interpret"))
def packed_product_mosaic(
    x: Array,  # [M, K]
    values: Array,  # int4 or e4m3 [V, K]; int4 in the kernel's order for the bits of x
    *scales: Array | None,  # by SCALES; x_scale [n or 1, M or more] is padded to whole SCALED_ROWS
    num_splits: int,
    dtype: jnp.dtype,
    config: PackedTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.packed_product.packed_product; only for what ``misfit`` accepts.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    given = {name: x for name, x in zip(SCALES, scales, strict=False) if x is not None}
    (rows, depth), (groups, width) = x.shape, given["scale"].shape
    weight_bits = 4 if values.dtype == jnp.int4 else 8
    x_bits = 8 * x.dtype.itemsize
    plan = ProductPlan(
        rows=rows,
        depth=depth,
        width=width,
        group=depth // groups,
        weight_bits=weight_bits,
        x_bits=x_bits,
        scales=tuple(given),
        num_splits=num_splits,
        config=config or packed_tuning(rows, depth, width, weight_bits, x_bits),
        interpret=interpret is not None,
    )
    if rows > 8:  # the copy engine fills a single tile of 8 rows with zeros, but not several
        x = jnp.pad(x, ((0, plan.padded_rows - rows), (0, 0)))
    missing = plan.padded_rows - given["x_scale"].shape[1] if "x_scale" in given else 0
    if missing > 0:
        given["x_scale"] = jnp.pad(given["x_scale"], ((0, 0), (0, missing)))
    kernel = _make_kernel(plan, x.dtype, given["scale"].dtype, dtype, interpret)
    return kernel(x, values, *given.values())


def _make_kernel(
    plan: ProductPlan, dtype: Any, scale_dtype: Any, out_dtype: Any, interpret: Any
) -> Any:
    warpgroups = plan.config.warpgroups
    scratch = ring_scratch(plan, dtype, scale_dtype)
    scratch["rows"] = plgpu.SMEM((warpgroups, plan.tile_rows, OUTPUTS), out_dtype)

    grid = {"tile": plan.width // plan.tile, "split": plan.num_splits}
    if plan.row_parts > 1:  # neighbours, which share weights in the second-level cache
        grid = {"part": plan.row_parts} | grid

    @fixed_name(interpret)
    def packed_product_kernel(x_in, values_in, *scales_and_out, **refs):
        *scales_in, out = scales_and_out
        scales = dict(zip(plan.scales, scales_in, strict=True))
        warpgroup = kernel_axes.index("warpgroup")

        @pl.when(warpgroup == warpgroups)
        def _copy():
            if plan.config.registers is not None:
                plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
            _copy_blocks(plan, x_in, values_in, scales, refs)

        @pl.when(warpgroup < warpgroups)
        def _compute():
            if plan.config.registers is not None:
                plgpu.set_max_registers(plan.config.registers, action="increase")
            outputs = pl.ds(kernel_axes.index("tile") * plan.tile + warpgroup * OUTPUTS, OUTPUTS)
            rows = own_rows(plan)  # those that are not there are not written
            total = _multiply_blocks(plan, refs)
            if plan.widens_to_float8:
                total = scaled_by_row(total, scales["x_scale"], rows)
            store_rows(total, out.at[kernel_axes.index("split"), rows, outputs], refs["rows"])

    return plgpu.kernel(
        packed_product_kernel,
        out_type=jax.ShapeDtypeStruct((plan.num_splits, plan.rows, plan.width), out_dtype),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=kernel_axes.names(*grid),
        num_threads=warpgroups + 1,
        thread_name=kernel_axes.name("warpgroup"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )


def _copy_blocks(plan: ProductPlan, x: Any, values: Any, scales: dict[str, Any], refs: Any) -> None:
    """Copy the blocks in order into the ring."""
    ring, tile = plan.stages, kernel_axes.index("tile")
    first = kernel_axes.index("split") * plan.blocks

    def copy(index: Array, carry: None) -> None:
        slot = lax.rem(index, ring)

        @pl.when(index >= ring)
        def _():
            plgpu.barrier_wait(refs["free"].at[slot])

        names = ("values", "x", "full", *plan.by_step)
        slot_refs = {name: refs[name].at[slot] for name in names}
        copy_block(plan, x, values, scales, slot_refs, tile, first + index)

    lax.fori_loop(0, plan.blocks, copy, None)
    for i in range(min(ring, plan.blocks)):  # every barrier must have completed its last phase
        plgpu.barrier_wait(refs["free"].at[lax.rem(plan.blocks - min(ring, plan.blocks) + i, ring)])


def _multiply_blocks(plan: ProductPlan, refs: Any) -> Array:
    """A warpgroup's outputs: float32 [OUTPUTS, rows]."""
    outputs = own_outputs()
    if not plan.scales_weights:

        def add(index: Array, total: Array) -> Array:
            return add_block(plan, refs, outputs, lax.rem(index, plan.stages), total)

        return lax.fori_loop(0, plan.blocks, add, no_sums(plan))
    if plan.interpret:
        zeros = jnp.zeros((OUTPUTS, plan.tile_rows), jnp.float32)
        return lax.fori_loop(
            0, plan.blocks, functools.partial(_add_block, plan, refs, outputs), zeros
        )
    return pl.run_scoped(
        functools.partial(_sum_blocks, plan, refs, outputs),
        plgpu.WGMMAAccumulatorRef((OUTPUTS, plan.tile_rows), jnp.float32),
    )


def _sum_blocks(plan: ProductPlan, refs: Any, outputs: Any, sums: Any) -> Array:
    """All blocks' products with scaled weights."""

    def step(index: Array, carry: None) -> None:
        slot = lax.rem(index, plan.stages)
        plgpu.barrier_wait(refs["full"].at[slot])
        accumulate(plan, refs, slot, outputs, range(0, plan.block, plan.unit), sums)
        plgpu.commit_smem()  # as in blocks.add_block
        plgpu.barrier_arrive(refs["free"].at[slot])

    lax.fori_loop(0, plan.blocks, step, None)
    return sums[...]


def _add_block(plan: ProductPlan, refs: Any, outputs: Any, index: Array, total: Array) -> Array:
    """A step of ``_sum_blocks`` for the interpreter, which knows no accumulators across blocks."""
    slot = lax.rem(index, plan.stages)
    plgpu.barrier_wait(refs["full"].at[slot])
    total += interpreted(plan, refs, slot, outputs, range(0, plan.block, plan.unit))
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs["free"].at[slot])
    return total
