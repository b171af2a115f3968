"""Products of rows with chosen experts on Hopper GPUs.

Two launches, gate and up with the activation, then down. Each has a CTA for every slot (see
slots.py) and tile of outputs. Weights are the first operand of the tensor cores (64 outputs a
warpgroup), as they are stored: outputs are consecutive. The lanes of a slot are the second one, so
that 8 of them fill it. A warpgroup copies blocks of weights and rows into a ring; the others
multiply. CTAs of empty slots end at once; what stands in empty lanes is never read.
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
from pallas_kernels.expert_product.plan import ExpertPlan
from pallas_kernels.expert_product.slot_kernel import lanes_of, launched, result_of
from pallas_kernels.expert_product.tuning import OUTPUTS, ExpertTuning, expert_tuning
from pallas_kernels.expert_slots import SlotProducts, Slots, make_slots, num_lanes
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.packed_product.blocks import store_rows
from pallas_kernels.shared_memory import swizzled

COLUMNS = 64  # 16-bit entries of a swizzled line


@functools.partial(jax.jit, static_argnames=("clamp", "config", "interpret"))
def expert_product_mosaic(
    x: Array,  # [N, H]
    experts: Array,  # int32 [N, k]
    gate_up: Array,  # [E, H, 2, F]
    down: Array,  # [E, F, H]
    bias: Array | None = None,  # [E, 2, F]
    *,
    clamp: Gating | None,
    config: ExpertTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.expert_product.expert_product; only for what ``misfit`` accepts.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    slots = make_slots(experts, len(gate_up))
    how: dict[str, Any] = {"clamp": clamp, "config": config, "interpret": interpret}
    return expert_slots_mosaic(x, slots, gate_up, down, bias, **how).by_pair


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("clamp", "config", "interpret"))
def expert_slots_mosaic(
    x: Array,
    slots: Slots,
    gate_up: Array,
    down: Array,
    bias: Array | None = None,
    *,
    clamp: Gating | None,
    config: ExpertTuning | None = None,
    interpret: Any = None,
) -> SlotProducts:
    """``expert_product_mosaic`` of the experts in ``slots``, without putting the products in
    order."""
    num_experts, hidden, parts, units = gate_up.shape
    rows, k = slots.places.shape
    lanes = num_lanes(rows, k, num_experts)

    def plan(depth: int, parts: int, width: int, *, shared: bool, dtype: Any) -> ExpertPlan:
        return ExpertPlan(
            num_experts=num_experts,
            slots=len(slots.expert),
            lanes=lanes,
            shared=shared,
            depth=depth,
            parts=parts,
            width=width,
            clamp=clamp,
            config=config or expert_tuning(lanes, depth, width),
            dtype=jnp.dtype(dtype),
            interpret=interpret is not None,
        )

    first = plan(hidden, parts, units, shared=slots.rows is None, dtype=x.dtype)
    second = plan(units, 1, hidden, shared=False, dtype=jnp.float32)
    of_lanes = x if slots.rows is None else x[slots.rows.reshape(-1)]
    biases = () if bias is None else (bias,)
    hidden_units = _make_kernel(first, x.dtype, len(biases), interpret)(
        slots.expert, of_lanes, gate_up.reshape(num_experts * hidden, parts * units), *biases
    )
    mixed = _make_kernel(second, x.dtype, 0, interpret)(
        slots.expert, hidden_units, down.reshape(num_experts * units, hidden)
    )
    return SlotProducts(mixed, slots.places)


def _make_kernel(plan: ExpertPlan, dtype: Any, num_biases: int, interpret: Any) -> Any:
    warpgroups, ring, block = plan.config.warpgroups, plan.stages, plan.block
    transforms = swizzled(COLUMNS, 16)
    values = (ring, plan.parts, warpgroups, block, OUTPUTS)
    scratch = {
        "values": plgpu.SMEM(values, dtype, transforms=transforms),
        "x": plgpu.SMEM((ring, plan.lanes, block), dtype, transforms=transforms),
        "rows": plgpu.SMEM((warpgroups, plan.lanes, OUTPUTS), plan.dtype),
        "full": plgpu.Barrier(num_arrivals=plan.parts * warpgroups + 1, num_barriers=ring),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=ring),
    }

    @fixed_name(interpret)
    def expert_product_kernel(expert_of_slot, x_in, weights_in, *biases_and_out, **refs):
        *biases, out = biases_and_out
        slot, tile = kernel_axes.index("slot"), kernel_axes.index("tile")
        warpgroup = kernel_axes.index("warpgroup")
        expert = expert_of_slot[slot]

        @pl.when((expert < plan.num_experts) & (warpgroup == warpgroups))
        def _copy():
            _copy_blocks(plan, x_in, weights_in, refs, expert)

        @pl.when((expert < plan.num_experts) & (warpgroup < warpgroups))
        def _compute():
            first = tile * plan.config.tile + warpgroup * OUTPUTS
            sums = _multiply_blocks(plan, refs)
            result = result_of(plan, sums, [ref.at[expert] for ref in biases], first)
            place = out.at[pl.ds(slot * plan.lanes, plan.lanes), pl.ds(first, OUTPUTS)]
            store_rows(result, place, refs["rows"])

    tiles = plan.width // plan.config.tile
    return launched(plan, expert_product_kernel, scratch, tiles, warpgroups + 1, interpret)


def _copy_blocks(plan: ExpertPlan, x: Any, weights: Any, refs: Any, expert: Array) -> None:
    """Copy the blocks in order into the ring.

    x [lanes of all slots, depth], or of shared lanes [N, depth]; weights [E * depth, parts * width]
    """
    ring, slot, tile = plan.stages, kernel_axes.index("slot"), kernel_axes.index("tile")
    lanes = lanes_of(plan, slot)

    def copy(index: Array, carry: None) -> None:
        stage = lax.rem(index, ring)
        full, start = refs["full"].at[stage], index * plan.block

        @pl.when(index >= ring)
        def _():
            plgpu.barrier_wait(refs["free"].at[stage])

        inputs = pl.ds(expert * plan.depth + start, plan.block)
        for part in range(plan.parts):
            for warpgroup in range(plan.config.warpgroups):
                first = part * plan.width + tile * plan.config.tile + warpgroup * OUTPUTS
                source = weights.at[inputs, pl.ds(first, OUTPUTS)]
                plgpu.copy_gmem_to_smem(source, refs["values"].at[stage, part, warpgroup], full)
        plgpu.copy_gmem_to_smem(x.at[lanes, pl.ds(start, plan.block)], refs["x"].at[stage], full)

    lax.fori_loop(0, plan.blocks, copy, None)
    for i in range(ring):  # every barrier must have completed its last phase
        plgpu.barrier_wait(refs["free"].at[lax.rem(plan.blocks - ring + i, ring)])


def _multiply_blocks(plan: ExpertPlan, refs: Any) -> Sequence[Array]:
    """A warpgroup's outputs of each part: float32 [OUTPUTS, lanes]."""
    shape = (OUTPUTS, plan.lanes)

    def taken(index: Array) -> Array:
        stage = lax.rem(index, plan.stages)
        plgpu.barrier_wait(refs["full"].at[stage])
        return stage

    def free(stage: Array) -> None:
        plgpu.commit_smem()  # what was read comes before what the copy engine writes there next
        plgpu.barrier_arrive(refs["free"].at[stage])

    def operands(stage: Array, part: int) -> tuple[Any, Any]:
        values = refs["values"].at[stage, part, kernel_axes.index("warpgroup")]
        return values.transpose((1, 0)), refs["x"].at[stage].transpose((1, 0))

    def accumulate(*sums: Any) -> list[Array]:
        def step(index: Array, carry: None) -> None:
            stage = taken(index)
            for part, accumulator in enumerate(sums):
                plgpu.wgmma(accumulator, *operands(stage, part))
            plgpu.wgmma_wait(0)
            free(stage)

        lax.fori_loop(0, plan.blocks, step, None)
        return [accumulator[...] for accumulator in sums]

    def add(index: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        """A step for the interpreter, which knows no accumulators across blocks."""
        stage = taken(index)
        pairs = [[operand[...] for operand in operands(stage, part)] for part in range(plan.parts)]
        free(stage)
        wide = [[operand.astype(jnp.float32) for operand in pair] for pair in pairs]
        products = [jnp.dot(*pair, precision=lax.Precision.HIGHEST) for pair in wide]
        return tuple(map(jnp.add, totals, products))

    if plan.interpret:
        zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in range(plan.parts))
        return lax.fori_loop(0, plan.blocks, add, zeros)
    refs_of_sums = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(plan.parts)]
    return pl.run_scoped(accumulate, *refs_of_sums)
