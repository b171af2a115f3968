"""Products of rows with chosen experts of 4 or 8 bits on Hopper GPUs.

As pallas_kernels/expert_product/mosaic_gpu.py: two launches, gate and up with the activation, then
down, and a CTA for every slot and tile of outputs. But weights are stored with the inputs last, and
are widened in registers, which are the first operand of the tensor cores.

Weights are exact in bfloat16. Scales that are floats multiply the sums of a step, which is a block
of inputs or a group; those that are bytes multiply the weights, which is exact (see widening.py).
The order of a row's sums depends neither on the other rows nor on the number of lanes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.activations import Gating
from pallas_kernels.expert_product.slot_kernel import (
    OUTPUT_LAYOUT,
    by_output,
    lanes_of,
    launched,
    result_of,
)
from pallas_kernels.expert_product.tuning import OUTPUTS
from pallas_kernels.expert_slots import SlotProducts, Slots, make_slots, num_lanes
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.packed_expert_product.plan import PackedExpertPlan
from pallas_kernels.packed_expert_product.tuning import PackedExpertTuning, packed_expert_tuning
from pallas_kernels.packed_expert_product.widening import (
    SUMS_OF_SCALED,
    Grouped,
    Part,
    float8_weights,
    integer_weights,
    integers_less_zeros,
    scaled_weights,
)
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.packed_product.blocks import store_rows, write_plain
from pallas_kernels.shared_memory import swizzled

COLUMNS = 64  # most 16-bit entries of a swizzled line of x


@functools.partial(jax.jit, static_argnames=("clamp", "config", "interpret"))
def packed_expert_product_mosaic(
    x: Array,  # [N, H]
    experts: Array,  # int32 [N, k]
    gate_up: PackedExperts,
    down: PackedExperts,
    bias: Array | None = None,  # [E, 2, F]
    *,
    clamp: Gating | None,
    config: PackedExpertTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.packed_expert_product.packed_expert_product; only for what ``misfit``
    accepts.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    slots = make_slots(experts, gate_up.num_experts)
    how: dict[str, Any] = {"clamp": clamp, "config": config, "interpret": interpret}
    return packed_expert_slots_mosaic(x, slots, gate_up, down, bias, **how).by_pair


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("clamp", "config", "interpret"))
def packed_expert_slots_mosaic(
    x: Array,
    slots: Slots,
    gate_up: PackedExperts,
    down: PackedExperts,
    bias: Array | None = None,
    *,
    clamp: Gating | None,
    config: PackedExpertTuning | None = None,
    interpret: Any = None,
) -> SlotProducts:
    """``packed_expert_product_mosaic`` of the experts in ``slots``, without putting the products
    in order."""
    rows, k = slots.places.shape
    lanes = num_lanes(rows, k, gate_up.num_experts)

    def product(x: Array, weights: PackedExperts, biases: Any, shared: bool, dtype: Any) -> Array:
        sizes = len(slots.expert), lanes
        plan = plan_of(
            weights,
            *sizes,
            shared=shared,
            clamp=clamp,
            config=config
            or packed_expert_tuning(*sizes, weights.depth, weights.width, weights.bits),
            dtype=dtype,
            interpreted=interpret is not None,
        )
        return slot_product(plan, x, slots.expert, weights, biases, interpret)

    of_lanes = x if slots.rows is None else x[slots.rows.reshape(-1)]
    biases = () if bias is None else (bias,)
    units = product(of_lanes, gate_up, biases, slots.rows is None, x.dtype)
    return SlotProducts(product(units, down, (), False, jnp.float32), slots.places)


def plan_of(
    weights: PackedExperts,
    slots: int,
    lanes: int,
    *,
    shared: bool,
    clamp: Gating | None,
    config: PackedExpertTuning,
    dtype: Any,
    interpreted: bool,
) -> PackedExpertPlan:
    """The sizes of a product of slots with such weights, whose results are of ``dtype``."""
    assert weights.width % config.tile == 0, "tiles do not cover the outputs"
    return PackedExpertPlan(
        num_experts=weights.num_experts,
        slots=slots,
        lanes=lanes,
        shared=shared,
        depth=weights.depth,
        parts=weights.parts,
        width=weights.width,
        clamp=clamp,
        code=weights.code,
        scaled=weights.block,
        scale_dtype=weights.scale.dtype,
        scale_code=weights.scale_code,
        has_zeros=weights.zero is not None,
        config=config,
        dtype=jnp.dtype(dtype),
        interpret=interpreted,
    )


def slot_product(
    plan: PackedExpertPlan,
    x: Array,
    expert_of_slot: Array,
    weights: PackedExperts,
    biases: Sequence[Array],
    interpret: Any,
) -> Array:
    """What slots make of their lanes of x: [lanes of all slots, width]."""
    factors = () if weights.factor is None else (weights.factor,)
    kernel = _make_kernel(plan, x.dtype, len(factors), len(biases), interpret)
    values = weights.values.reshape(-1, weights.values.shape[-1])
    scale = weights.scale.reshape(-1, weights.scale.shape[-1])
    zeros = () if weights.zero is None else (weights.zero.reshape(scale.shape),)
    return kernel(expert_of_slot, x, values, scale, *zeros, *factors, *biases)


def _make_kernel(
    plan: PackedExpertPlan, dtype: Any, num_factors: int, num_biases: int, interpret: Any
) -> Any:
    warpgroups, shares = plan.config.warpgroups, plan.shares

    @fixed_name(interpret)
    def packed_expert_product_kernel(
        expert_of_slot, x_in, values_in, scale_in, *others_and_out, **refs
    ):
        *others, out = others_and_out
        zeros, others = others[: plan.has_zeros], others[plan.has_zeros :]
        factors, biases = others[:num_factors], others[num_factors:]
        slot, tile = kernel_axes.index("slot"), kernel_axes.index("tile")
        thread = kernel_axes.index("warpgroup")
        warpgroup, share = lax.rem(thread, warpgroups), lax.div(thread, warpgroups)
        first = tile * plan.tiles * plan.config.tile + warpgroup * OUTPUTS
        expert = expert_of_slot[slot]
        is_there = expert < plan.num_experts

        @pl.when(is_there & (share == shares))
        def _copy():
            _copy_blocks(plan, x_in, values_in, (scale_in, *zeros), refs, expert)

        if shares > 1:

            @pl.when(is_there & (share > 0) & (share < shares))
            def _share():
                sums = _multiply_blocks(plan, refs, scale_in, expert, first, share)
                for part, total in enumerate(sums):
                    write_plain(refs["sums"].at[share - 1, part, warpgroup], total)
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs["summed"])

        @pl.when(is_there & (share == 0))
        def _compute():
            def compute_tile(i: Array, carry: None) -> None:
                outputs, done = first + i * plan.config.tile, i * plan.blocks
                sums = _multiply_blocks(plan, refs, scale_in, expert, outputs, share, done)
                if shares > 1:
                    plgpu.barrier_wait(refs["summed"])
                    sums = _with_shares(plan, refs, sums)
                sums = _brought_back(plan, sums, [ref.at[expert] for ref in factors], outputs)
                result = result_of(plan, sums, [ref.at[expert] for ref in biases], outputs)
                lanes = pl.ds(slot * plan.lanes, plan.lanes)
                store_rows(result, out.at[lanes, pl.ds(outputs, OUTPUTS)], refs["rows"])

            lax.fori_loop(0, plan.tiles, compute_tile, None)

    tiles = plan.width // (plan.tiles * plan.config.tile)
    threads = warpgroups * shares + 1
    return launched(
        plan, packed_expert_product_kernel, _scratch(plan, dtype), tiles, threads, interpret
    )


def _scratch(plan: PackedExpertPlan, dtype: Any) -> dict[str, Any]:
    """The memory of a CTA: the ring, what warpgroups that share sums hand over, rows of results."""
    warpgroups, ring, shares = plan.config.warpgroups, plan.stages, plan.shares
    copies = plan.parts * warpgroups * (1 + (plan.groups > 0) + plan.has_zeros) + 1
    values = (ring, plan.parts, warpgroups, OUTPUTS, plan.row)
    lines = swizzled(min(COLUMNS, plan.unit), 16)
    scratch = {
        "values": plgpu.SMEM(values, jnp.uint8, transforms=swizzled(plan.line, 8)),
        "x": plgpu.SMEM((ring, plan.lanes, plan.block), dtype, transforms=lines),
        "rows": plgpu.SMEM((warpgroups, plan.lanes, OUTPUTS), plan.dtype),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=ring),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=ring),
    }
    if shares > 1:
        sums = (shares - 1, plan.parts, warpgroups, OUTPUTS, plan.lanes)
        scratch["sums"] = plgpu.SMEM(sums, jnp.float32)
        scratch["summed"] = plgpu.Barrier(num_arrivals=(shares - 1) * warpgroups)
    if plan.groups:
        by_group = (ring, plan.parts, warpgroups, plan.groups, OUTPUTS)
        scratch["scale"] = plgpu.SMEM(by_group, plan.scale_dtype)
        if plan.has_zeros:
            scratch["zero"] = plgpu.SMEM(by_group, jnp.bfloat16)
    return scratch


def _copy_blocks(
    plan: PackedExpertPlan, x: Any, values: Any, scales: Sequence[Any], refs: Any, expert: Array
) -> None:
    """Copy the blocks of each tile in order into the ring.

    x [lanes of all slots, depth], or of shared lanes [N, depth]; values [E * parts * width, bytes];
    scales [E * parts * groups, width], and zeros as them, if there are any
    """
    ring, slot, tile = plan.stages, kernel_axes.index("slot"), kernel_axes.index("tile")
    lanes = lanes_of(plan, slot)
    num_groups = plan.depth // plan.scaled[1]

    def copy(index: Array, carry: None) -> None:
        stage, block = lax.rem(index, ring), lax.rem(index, plan.blocks)
        full, start = refs["full"].at[stage], block * plan.block
        outputs_of_tile = (tile * plan.tiles + lax.div(index, plan.blocks)) * plan.config.tile

        @pl.when(index >= ring)
        def _():
            plgpu.barrier_wait(refs["free"].at[stage])

        in_bytes = pl.ds(block * plan.row, plan.row)
        for part in range(plan.parts):
            for warpgroup in range(plan.config.warpgroups):
                place = (stage, part, warpgroup)
                first = outputs_of_tile + warpgroup * OUTPUTS
                outputs = pl.ds((expert * plan.parts + part) * plan.width + first, OUTPUTS)
                source = values.at[outputs, in_bytes]
                plgpu.copy_gmem_to_smem(source, refs["values"].at[place], full)
                if plan.groups:
                    group = lax.div(start, plan.scaled[1])
                    rows = (expert * plan.parts + part) * num_groups + group
                    for name, array in zip(("scale", "zero"), scales, strict=False):
                        source = array.at[pl.ds(rows, plan.groups), pl.ds(first, OUTPUTS)]
                        plgpu.copy_gmem_to_smem(source, refs[name].at[place], full)
        plgpu.copy_gmem_to_smem(x.at[lanes, pl.ds(start, plan.block)], refs["x"].at[stage], full)

    total = plan.tiles * plan.blocks
    lax.fori_loop(0, total, copy, None)
    for i in range(ring):  # every barrier must have completed its last phase
        plgpu.barrier_wait(refs["free"].at[(total - ring + i) % ring])


def _multiply_blocks(
    plan: PackedExpertPlan,
    refs: Any,
    scale: Any,
    expert: Array,
    first: Array,
    share: Array,
    done: Array | int = 0,
) -> Sequence[Array]:
    """Sums of a warpgroup's share of the blocks, of each part: float32 [OUTPUTS, lanes].

    ``first``: of the outputs. ``done``: blocks of tiles before. ``scale``: of blocks of outputs and
    inputs [E * parts * rows, columns], in global memory.
    """
    num_rows = -(-plan.width // plan.scaled[0])

    def block_scales(index: Array) -> list[Array]:
        """Those of a block of outputs and inputs: scalars."""
        if plan.groups:
            return []
        block = jnp.minimum(index, plan.blocks - 1)
        column = lax.div(block * plan.block, plan.scaled[1])
        row = lax.div(first, plan.scaled[0])
        rows = [(expert * plan.parts + part) * num_rows + row for part in range(plan.parts)]
        return [scale[row, column] for row in rows]

    def add(i: Array, carry: Any) -> Any:
        totals, scales = carry
        index = i * plan.shares + share
        following = block_scales(index + plan.shares)  # under way while this block is multiplied
        stage = lax.rem(done + index, plan.stages)
        plgpu.barrier_wait(refs["full"].at[stage])
        for start in range(0, plan.block, plan.step):
            sums = _sums_of_step(plan, refs, stage, start)
            if plan.groups and not plan.scales_weights:
                scales = [
                    _group_scale(plan, refs, stage, part, start) for part in range(plan.parts)
                ]
            if plan.scales_weights:
                totals = [total + part for total, part in zip(totals, sums, strict=True)]
            else:
                terms = zip(totals, sums, scales, strict=True)
                totals = [total + part * by for total, part, by in terms]
        plgpu.commit_smem()  # what was read comes before what the copy engine writes there next
        plgpu.barrier_arrive(refs["free"].at[stage])
        return totals, following

    zeros = jnp.zeros((OUTPUTS, plan.lanes), jnp.float32)
    none = [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for _ in range(plan.parts)]
    carry = none, block_scales(share)
    totals, _ = lax.fori_loop(0, plan.blocks // plan.shares, add, carry)
    return totals


def _with_shares(plan: PackedExpertPlan, refs: Any, sums: Sequence[Array]) -> Sequence[Array]:
    """The sums of all warpgroups that share the blocks, added in their order."""
    warpgroup, totals = _warpgroup(plan), list(sums)
    for share in range(plan.shares - 1):
        for part in range(plan.parts):
            place = refs["sums"].at[share, part, warpgroup]
            totals[part] += plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
    return totals


def _sums_of_step(plan: PackedExpertPlan, refs: Any, stage: Array, start: int) -> Sequence[Array]:
    """The weights of a step times x, of each part: float32 [OUTPUTS, lanes]."""
    units = [
        (first, part)
        for first in range(start, start + plan.step, plan.unit)
        for part in range(plan.parts)
    ]
    shape = (OUTPUTS, plan.lanes)
    if plan.interpret:  # it knows no operands in registers
        totals = [jnp.zeros(shape, jnp.float32) for _ in range(plan.parts)]
        for first, part in units:
            wide = _weights(plan, refs, stage, first, part).astype(jnp.float32)
            x = _x(plan, refs, stage, first)[...].astype(jnp.float32)
            totals[part] += jnp.dot(wide, x, precision=lax.Precision.HIGHEST)
        return totals

    def multiply(*sums: Any) -> Sequence[Array]:
        weights = _weights(plan, refs, stage, *units[0])
        for (first, part), following in zip(units, [*units[1:], None], strict=True):
            plgpu.wgmma(sums[part], weights, _x(plan, refs, stage, first))
            # Widened while the tensor cores multiply.
            weights = _weights(plan, refs, stage, *following) if following else weights
            plgpu.wgmma_wait(0)  # the registers of the weights before are free
        return [each[...] for each in sums]

    sums = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(plan.parts)]
    return pl.run_scoped(multiply, *sums)


def _weights(plan: PackedExpertPlan, refs: Any, stage: Array, start: int, part: int) -> Array:
    """A unit of a part's: bfloat16 [OUTPUTS, unit]."""
    place = (stage, part, _warpgroup(plan))
    values, interpret = refs["values"].at[place], plan.interpret
    inputs = Part(start, plan.unit, plan.line)
    grouped = Grouped(plan.code, plan.scaled[1], plan.scale_code)
    if plan.scales_weights:
        scales = refs["scale"].at[place]
        return scaled_weights(values, scales, inputs, grouped, interpret=interpret)
    if plan.has_zeros:
        zeros = refs["zero"].at[place]
        return integers_less_zeros(values, zeros, inputs, grouped, interpret=interpret)
    widened = float8_weights if plan.code == "e4m3" else integer_weights
    return widened(values, inputs, interpret=interpret)


def _warpgroup(plan: PackedExpertPlan) -> Array:
    """The index of this warpgroup's outputs among those of its CTA."""
    return lax.rem(kernel_axes.index("warpgroup"), plan.config.warpgroups)


def _x(plan: PackedExpertPlan, refs: Any, stage: Array, start: int) -> Any:
    """[unit, lanes]"""
    return refs["x"].at[stage, :, pl.ds(start, plan.unit)].transpose((1, 0))


def _group_scale(plan: PackedExpertPlan, refs: Any, stage: Array, part: int, start: int) -> Array:
    """The scales of a step's group: float32 [OUTPUTS, lanes]."""
    place = (stage, part, _warpgroup(plan), start // plan.scaled[1])
    scale = plgpu.load(refs["scale"].at[place], layout=OUTPUT_LAYOUT, optimized=False)
    return lax.broadcast_in_dim(scale.astype(jnp.float32), (OUTPUTS, plan.lanes), [0])


def _brought_back(
    plan: PackedExpertPlan, sums: Sequence[Array], factors: Sequence[Any], first: Array
) -> Sequence[Array]:
    """Sums [OUTPUTS, lanes] of each part, times what their weights lack."""
    if plan.scales_weights:
        sums = [total * SUMS_OF_SCALED for total in sums]
    for factor in factors:
        wide = by_output(plan, factor, sums, first)
        sums = [total * by for total, by in zip(sums, wide, strict=True)]
    return sums
