"""The product with weights of 4 or 8 bits on Hopper GPUs.

Weights are the first operand of the tensor cores (64 outputs a warpgroup), and rows of x the second
one: so a product of few rows fills them. Weights of 4 bits are widened in registers; floats of 8
bits are multiplied as they are. A warpgroup copies blocks of weights, x and scales into a ring; the
others multiply.

Of up to SUMMED_ROWS rows scales multiply the sums of a step (a group's inputs, or 128 of a larger
group's), not the weights. So sums of 8-bit floats, which tensor cores keep with fewer bits, are
short, and a row's sums depend neither on the other rows nor on the size of blocks.

Of more rows registers hold one sum of each output only: then weights are scaled and rounded to
bfloat16, as in a product with widened weights.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.packed_product.tuning import (
    LARGEST_STEP,
    OUTPUTS,
    SUMMED_ROWS,
    PackedTuning,
    packed_tuning,
    scaled_rows,
)
from pallas_kernels.packed_product.widening import BIAS, biased_weights
from pallas_kernels.shared_memory import LINE, swizzled

MOST_COPIED = 256  # entries of a dimension that the copy engine takes at once

_OUTPUT_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # one value for each output of a warpgroup
_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # one value for each row of x


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of a product: x [rows, depth] times weights [width, depth]."""

    rows: int  # of x and the result
    padded_rows: int  # of the tensor cores' operand
    depth: int
    width: int
    group: int  # inputs that share a scale
    more: tuple[str, ...]  # by group, beside the weights' scales: zero, x_scale
    num_splits: int
    config: PackedTuning
    interpret: bool

    @property
    def tile(self) -> int:
        """Outputs of a CTA."""
        return self.config.tile

    @property
    def block(self) -> int:
        """Inputs of a block: whole lines of weights where the inputs of a CTA are so many."""
        line = LINE if self.is_float8 else self.config.block
        return math.gcd(line, self.depth // self.num_splits)

    @property
    def blocks(self) -> int:
        """Blocks of a CTA."""
        return self.depth // self.num_splits // self.block

    @property
    def scales_weights(self) -> bool:
        """Whether weights are scaled, instead of sums."""
        return self.rows > SUMMED_ROWS

    @property
    def step(self) -> int:
        """Inputs that are summed before the sums are scaled."""
        return min(self.group, LARGEST_STEP)

    @property
    def unit(self) -> int:
        """Inputs of a product of the tensor cores."""
        return self.step if self.is_float8 else min(self.config.unit, self.step)

    @property
    def block_groups(self) -> int:
        return max(1, self.block // self.group)

    @property
    def stages(self) -> int:
        """Blocks in the ring."""
        entry = 2 - self.is_float8  # bytes of an entry of x: four times those of a weight, or once
        weights = self.tile * self.block * entry // (1 if self.is_float8 else 4)
        scales = 4 * self.block_groups * (self.tile + self.is_float8 * self.scaled_rows)
        stage = weights + entry * self.padded_rows * self.block + scales
        return self.config.stages(stage, 4 * self.padded_rows * self.tile)

    @property
    def part(self) -> int:
        """Outputs whose scales are copied at once."""
        return max(
            size for size in range(OUTPUTS, MOST_COPIED + 1, OUTPUTS) if not self.tile % size
        )

    @property
    def copies(self) -> int:
        """Copies of a block: x, weights, scales, and ``more``."""
        by_output = 1 + ("zero" in self.more)
        return 2 + by_output * (self.tile // self.part) + self.is_float8

    @property
    def is_float8(self) -> bool:
        return "x_scale" in self.more

    @property
    def scaled_rows(self) -> int:
        """Rows of x that have a scale, padding included."""
        return scaled_rows(self.rows)


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("num_splits", "dtype", "config", "interpret"))
def packed_product_mosaic(
    x: Array,  # [M, K]
    values: Array,  # int4 or e4m3 [V, K]
    scale: Array,  # [n, V]
    zero: Array | None,  # [n, V]
    x_scale: Array | None = None,  # [n, M], padded to a multiple of SCALED_ROWS
    *,
    num_splits: int,
    dtype: jnp.dtype,
    config: PackedTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.packed_product.packed_product; only for what ``misfit`` accepts.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    (rows, depth), (groups, width) = x.shape, scale.shape
    given = {"zero": zero, "x_scale": x_scale}
    more = {name: one for name, one in given.items() if one is not None}
    plan = _Plan(
        rows=rows,
        padded_rows=-(-rows // 8) * 8,
        depth=depth,
        width=width,
        group=depth // groups,
        more=tuple(more),
        num_splits=num_splits,
        config=config or packed_tuning(rows, float8=x_scale is not None),
        interpret=interpret is not None,
    )
    if rows > 8:  # the copy engine fills a single tile of 8 rows with zeros, but not several
        x = jnp.pad(x, ((0, plan.padded_rows - rows), (0, 0)))
    kernel = _make_kernel(plan, x.dtype, scale.dtype, dtype, interpret)
    return kernel(x, values, scale, *more.values())


def _make_kernel(plan: _Plan, dtype: Any, scale_dtype: Any, out_dtype: Any, interpret: Any) -> Any:
    config, block = plan.config, plan.block
    ring, bits = plan.stages, 8 * dtype.itemsize
    by_output = (ring, plan.tile // plan.part, plan.block_groups, plan.part)
    x_tile = min(8 * LINE // bits, plan.unit)
    values_dtype, values_bits = (dtype, 8) if plan.is_float8 else (jnp.int4, 4)
    values_transforms = swizzled(block, values_bits)

    scratch: dict[str, Any] = {
        "values": plgpu.SMEM((ring, plan.tile, block), values_dtype, transforms=values_transforms),
        "x": plgpu.SMEM((ring, plan.padded_rows, block), dtype, transforms=swizzled(x_tile, bits)),
        "scale": plgpu.SMEM(by_output, scale_dtype),
        "rows": plgpu.SMEM((config.warpgroups, plan.padded_rows, OUTPUTS), out_dtype),
        "full": plgpu.Barrier(num_arrivals=plan.copies, num_barriers=ring),
        "free": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=ring),
    }
    if "zero" in plan.more:
        scratch["zero"] = plgpu.SMEM(by_output, scale_dtype)
    if plan.is_float8:
        by_row = (ring, plan.block_groups, plan.scaled_rows)
        scratch["x_scale"] = plgpu.SMEM(by_row, jnp.float32)

    def packed_product_kernel(x_in, values_in, scale_in, *more_and_out, **refs):
        *more_in, out = more_and_out
        by_group = dict(zip(("scale", *plan.more), (scale_in, *more_in), strict=True))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == config.warpgroups)
        def _copy():
            _copy_blocks(plan, x_in, values_in, by_group, refs)

        @pl.when(warpgroup < config.warpgroups)
        def _compute():
            _store(plan, _multiply_blocks(plan, refs), out, refs)

    return plgpu.kernel(
        packed_product_kernel,
        out_type=jax.ShapeDtypeStruct((plan.num_splits, plan.rows, plan.width), out_dtype),
        scratch_types=scratch,
        grid=(plan.width // plan.tile, plan.num_splits),
        grid_names=("tile", "split"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )


def _copy_blocks(plan: _Plan, x: Any, values: Any, by_group: dict[str, Any], refs: Any) -> None:
    """Copy the blocks in order into the ring."""
    ring, tile, tile_size = plan.stages, lax.axis_index("tile"), plan.tile
    outputs = pl.ds(tile * tile_size, tile_size)
    # x may have fewer rows than the tile: a start that is not known keeps the slice from being
    # checked, and the copy engine writes zeros for rows that are not there.
    rows = pl.ds(0 * tile, plan.padded_rows)
    first = lax.axis_index("split") * plan.blocks

    def copy(index: Array, carry: None) -> None:
        slot = lax.rem(index, ring)

        @pl.when(index >= ring)
        def _():
            plgpu.barrier_wait(refs["free"].at[slot])

        inputs, full = pl.ds((first + index) * plan.block, plan.block), refs["full"].at[slot]
        groups = pl.ds((first + index) * plan.block // plan.group, plan.block_groups)
        plgpu.copy_gmem_to_smem(values.at[outputs, inputs], refs["values"].at[slot], full)
        plgpu.copy_gmem_to_smem(x.at[rows, inputs], refs["x"].at[slot], full)
        for name, source in by_group.items():
            if name == "x_scale":
                scales = source.at[groups, pl.ds(0, plan.scaled_rows)]
                plgpu.copy_gmem_to_smem(scales, refs[name].at[slot], full)
                continue
            for part in range(tile_size // plan.part):
                own = pl.ds(tile * tile_size + part * plan.part, plan.part)
                plgpu.copy_gmem_to_smem(source.at[groups, own], refs[name].at[slot, part], full)

    lax.fori_loop(0, plan.blocks, copy, None)
    for i in range(min(ring, plan.blocks)):  # every barrier must have completed its last phase
        plgpu.barrier_wait(refs["free"].at[lax.rem(plan.blocks - min(ring, plan.blocks) + i, ring)])


def _multiply_blocks(plan: _Plan, refs: Any) -> Array:
    """A warpgroup's outputs: float32 [OUTPUTS, rows]."""
    warpgroup, ring = lax.axis_index("warpgroup"), plan.stages
    own = pl.ds(warpgroup * OUTPUTS, OUTPUTS)
    zeros = jnp.zeros((OUTPUTS, plan.padded_rows), jnp.float32)
    if plan.scales_weights and plan.interpret:
        return lax.fori_loop(0, plan.blocks, functools.partial(_add_block, plan, refs, own), zeros)
    if plan.scales_weights:
        return pl.run_scoped(
            functools.partial(_sum_blocks, plan, refs, own),
            plgpu.WGMMAAccumulatorRef((OUTPUTS, plan.padded_rows), jnp.float32),
        )

    def multiply_block(index: Array, total: Array) -> Array:
        slot, weights = lax.rem(index, ring), None
        plgpu.barrier_wait(refs["full"].at[slot])
        for start in range(0, plan.block, plan.step):
            group = start // plan.group
            sums, weights = _product(plan, refs, slot, own, start, weights)
            if plan.is_float8:
                x_scales = refs["x_scale"].at[slot, group, pl.ds(0, plan.padded_rows)]
                x_scale = plgpu.load(x_scales, layout=_ROW_LAYOUT, optimized=False)
                sums *= lax.broadcast_in_dim(x_scale, sums.shape, [1])
            scale = _by_output(plan, refs["scale"], slot, group).astype(jnp.float32)
            total += sums * lax.broadcast_in_dim(scale, sums.shape, [0])
        plgpu.commit_smem()  # what was read comes before what the copy engine writes there next
        plgpu.barrier_arrive(refs["free"].at[slot])
        return total

    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    return lax.fori_loop(0, plan.blocks, multiply_block, zeros)


def _sum_blocks(plan: _Plan, refs: Any, own: Any, sums: Any) -> Array:
    """All blocks' products with scaled weights."""

    def add_block(index: Array, carry: None) -> None:
        slot = lax.rem(index, plan.stages)
        plgpu.barrier_wait(refs["full"].at[slot])
        _accumulate(plan, refs, slot, own, range(0, plan.block, plan.unit), sums)
        plgpu.commit_smem()  # see _multiply_blocks
        plgpu.barrier_arrive(refs["free"].at[slot])

    lax.fori_loop(0, plan.blocks, add_block, None)
    return sums[...]


def _add_block(plan: _Plan, refs: Any, own: Any, index: Array, total: Array) -> Array:
    """A step of ``_sum_blocks`` for the interpreter, which knows no accumulators across blocks."""
    slot = lax.rem(index, plan.stages)
    plgpu.barrier_wait(refs["full"].at[slot])
    total += _interpreted(plan, refs, slot, own, range(0, plan.block, plan.unit))
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs["free"].at[slot])
    return total


def _product(
    plan: _Plan, refs: Any, slot: Array, own: Any, start: int, weights: Any
) -> tuple[Array, Any]:
    """The weights of a step times x: float32 [OUTPUTS, rows].

    ``weights``: the step's first ones, if they are widened already. Also returns those of the next
    step, or None.
    """
    starts = range(start, start + plan.step, plan.unit)
    if plan.interpret:
        return _interpreted(plan, refs, slot, own, starts), None

    def multiply(sums: Any) -> tuple[Array, Any]:
        following = _accumulate(plan, refs, slot, own, starts, sums, weights)
        return sums[...], following

    sums = plgpu.WGMMAAccumulatorRef((OUTPUTS, plan.padded_rows), jnp.float32)
    return pl.run_scoped(multiply, sums)


def _accumulate(
    plan: _Plan,
    refs: Any,
    slot: Array,
    own: Any,
    starts: Sequence[int],
    sums: Any,
    weights: Any = None,
) -> Any:
    """Add the products of the units that begin at ``starts``; ``weights`` as in ``_product``."""
    for first in starts:
        if weights is None:
            weights = _weights(plan, refs, slot, own, first)
        plgpu.wgmma(sums, weights, _x(plan, refs, slot, first))
        following = first + plan.unit
        widens = plan.config.ahead and not plan.is_float8 and following < plan.block
        weights = _weights(plan, refs, slot, own, following) if widens else None
        plgpu.wgmma_wait(0)  # the registers of these weights are free for the next ones
    return weights


def _interpreted(plan: _Plan, refs: Any, slot: Array, own: Any, starts: Sequence[int]) -> Array:
    """The same: the interpreter knows no operands in registers, and CPUs no 8-bit floats."""
    total = jnp.zeros((OUTPUTS, plan.padded_rows), jnp.float32)
    for first in starts:
        weights = _weights(plan, refs, slot, own, first)[...].astype(jnp.float32)
        x = _x(plan, refs, slot, first)[...].astype(jnp.float32)
        total += jnp.dot(weights, x, precision=lax.Precision.HIGHEST)
    return total


def _weights(plan: _Plan, refs: Any, slot: Array, own: Any, start: int) -> Any:
    """A unit of them: [OUTPUTS, unit]."""
    if plan.is_float8:
        return refs["values"].at[slot, own, pl.ds(start, plan.unit)]
    return _widened(plan, refs, slot, own, start)


def _x(plan: _Plan, refs: Any, slot: Array, start: int) -> Any:
    """[unit, rows]"""
    return refs["x"].at[slot, :, pl.ds(start, plan.unit)].transpose((1, 0))


def _widened(plan: _Plan, refs: Any, slot: Array, own: Any, start: int) -> Array:
    """Weights of 4 bits less their zeros, exactly, or scaled: bfloat16 [OUTPUTS, unit]."""
    values = refs["values"].at[slot, own]
    biased = biased_weights(values, start, plan.unit, interpret=plan.interpret)
    bias = jnp.bfloat16(BIAS)
    if "zero" in plan.more:
        zero = _by_output(plan, refs["zero"], slot, start // plan.group)
        bias = lax.broadcast_in_dim(zero.astype(jnp.bfloat16) + bias, biased.shape, [0])
    weights = biased - bias
    if not plan.scales_weights:
        return weights
    scale = _by_output(plan, refs["scale"], slot, start // plan.group)
    dtype = jnp.promote_types(weights.dtype, scale.dtype)  # float32 if scales are float16
    scale = lax.broadcast_in_dim(scale.astype(dtype), weights.shape, [0])
    return (weights.astype(dtype) * scale).astype(weights.dtype)


def _by_output(plan: _Plan, ref: Any, slot: Array, group: int) -> Array:
    """A warpgroup's scales or zeros of a group."""
    first = lax.axis_index("warpgroup") * OUTPUTS
    own = pl.ds(lax.rem(first, plan.part), OUTPUTS)
    place = ref.at[slot, lax.div(first, plan.part), group, own]
    return plgpu.load(place, layout=_OUTPUT_LAYOUT, optimized=False)


def _store(plan: _Plan, total: Array, out: Any, refs: Any) -> None:
    """Store outputs [OUTPUTS, rows] as rows of the result."""
    warpgroup, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
    own = refs["rows"].at[warpgroup]
    transposed = plgpu.layout_cast(total.astype(own.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    _write(own.transpose((1, 0)), transposed)
    plgpu.commit_smem()
    outputs = pl.ds(tile * plan.tile + warpgroup * OUTPUTS, OUTPUTS)
    rows = pl.ds(0 * tile, plan.padded_rows)  # those that are not there are not written
    plgpu.copy_smem_to_gmem(own, out.at[lax.axis_index("split"), rows, outputs])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _write(ref: Any, value: Array) -> None:
    """Store to plain shared memory. jax 0.12 has to be told that bank conflicts are allowed."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
