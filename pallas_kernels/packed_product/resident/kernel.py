"""Rows times weights of 4 bits on Hopper GPUs: weights become bfloat16 in registers.

Tensor cores take one operand from registers: the weights, 64 output features a warpgroup. Rows of x
are the columns of the product, padded to a multiple of 8, and lie in shared memory. A work item is
64 output features of one split of the inputs. A CTA, one on each multiprocessor, takes items of the
same split in turns, so its part of x is loaded once. A producer warpgroup copies blocks of weights
by TMA into a ring, across items; from the start, while the others load x. Those multiply blocks in
turns, each with sums of its own, and the first one adds them up and stores them.

The sum of a group is multiplied by the group's scale once, in float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.packed_product.resident.places import BIAS
from pallas_kernels.packed_product.resident.plan import SLOTS, Plan
from pallas_kernels.packed_product.resident.registers import (
    load_weights,
    store_x,
    weights_layout,
    x_layout,
)
from pallas_kernels.packed_product.resident.tuning import (
    DEFAULT,
    TILE,
    ProductTuning,
)

PRODUCER_REGISTERS, REGISTERS = 40, 232  # of a thread, with two consumers
_BY_OUTPUT = plgpu.Layout.WGMMA.reduce(1)


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("num_splits", "config", "interpret"))
def resident_product(
    x: Array,  # [M, in]
    values: Array,  # [out, in]
    scale: Array,  # [in / group, out]
    zero: Array | None,  # [in / group, out]
    *,
    num_splits: int,
    config: ProductTuning = DEFAULT,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.packed_product.packed_product; only for what ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    num_groups, width = scale.shape
    plan = Plan(
        rows=len(x),
        depth=x.shape[1],
        width=width,
        num_groups=num_groups,
        zeros=zero is not None,
        splits=num_splits,
        scale_dtype=scale.dtype,
        config=config,
        interpret=interpret is not None,
    )
    plan.check()
    by_group = [scale] if zero is None else [scale, zero.astype(jnp.bfloat16)]
    return _make_kernel(plan, interpret)(x, values, *by_group)


def _make_kernel(plan: Plan, interpret: Any) -> Any:
    config, stages = plan.config, plan.stages
    sums = (TILE, plan.padded)

    def scratch() -> dict[str, Any]:
        x_shape = (plan.split_depth // plan.unit, plan.padded, plan.unit)
        scales_shape = (SLOTS, plan.scales, TILE)
        refs = {
            "rows": plgpu.SMEM(x_shape, jnp.bfloat16, transforms=x_layout(plan.unit)),
            "weights": plgpu.SMEM(
                (stages, TILE, config.block), jnp.int4, transforms=weights_layout()
            ),
            "scales": plgpu.SMEM(scales_shape, plan.scale_dtype),
            "out": plgpu.SMEM((1, *sums[::-1]), jnp.float32),
            "x_stored": plgpu.Barrier(num_arrivals=config.consumers),
            "full": plgpu.Barrier(num_barriers=stages),
            "free": plgpu.Barrier(num_barriers=stages),
            "scales_full": plgpu.Barrier(num_arrivals=len(plan.by_group), num_barriers=SLOTS),
            "scales_free": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=SLOTS),
        }
        if plan.zeros:
            refs["zeros"] = plgpu.SMEM(scales_shape, jnp.bfloat16)
        if config.consumers > 1:
            others = config.consumers - 1
            refs["sums"] = plgpu.SMEM((others, *sums), jnp.float32)
            refs["sums_full"] = plgpu.Barrier(num_barriers=others)
            refs["sums_free"] = plgpu.Barrier(num_barriers=others)
        return refs

    def resident_product_kernel(x, values, scale, *zero_and_out, **refs):
        *zero, out = zero_and_out
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        split, first = lax.rem(cta, plan.splits), cta // plan.splits
        num_items = (plan.tiles - 1 - first) // plan.share + 1
        work = _Work(split, first, num_items)

        @pl.when(warpgroup == config.consumers)
        def _produce():
            if config.consumers == 2:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            _copy_weights(plan, work, values, [scale, *zero], refs)

        @pl.when(warpgroup < config.consumers)
        def _multiply():
            if config.consumers == 2:
                plgpu.set_max_registers(REGISTERS, action="increase")
            _multiply_items(plan, work, x, out, refs)

    return plgpu.kernel(
        resident_product_kernel,
        out_type=jax.ShapeDtypeStruct((plan.splits, plan.rows, plan.width), jnp.float32),
        scratch_types=scratch(),
        grid=(plan.splits * plan.share,),
        grid_names=("cta",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """The items of a CTA: tiles ``first + i * plan.share`` of one split."""

    split: Array
    first: Array
    num_items: Array

    def first_output(self, plan: Plan, item: Array) -> Array:
        return (self.first + item * plan.share) * TILE

    def first_group(self, plan: Plan) -> Array:
        return self.split * plan.split_depth // plan.group


def _copy_weights(plan: Plan, work: _Work, values: Any, by_group: list[Any], refs: Any) -> None:
    """Copy the blocks of all items in order into the ring, and each item's scales before them."""

    def wait_until_free(name: str, index: Array, number: int) -> None:
        @pl.when(index >= number)
        def _():
            plgpu.barrier_wait(refs[name].at[lax.rem(index, number)])

    def copy_item(item: Array, carry: None) -> None:
        outputs = pl.ds(work.first_output(plan, item), TILE)
        slot = lax.rem(item, SLOTS)
        wait_until_free("scales_free", item, SLOTS)
        for name, source in zip(plan.by_group, by_group, strict=True):
            source = source.at[pl.ds(work.first_group(plan), plan.scales), outputs]
            plgpu.copy_gmem_to_smem(source, refs[name].at[slot], refs["scales_full"].at[slot])

        def copy_block(block: Array, carry: None) -> None:
            index = item * plan.blocks + block
            stage = lax.rem(index, plan.stages)
            wait_until_free("free", index, plan.stages)
            begin = work.split * plan.split_depth + block * plan.config.block
            plgpu.copy_gmem_to_smem(
                values.at[outputs, pl.ds(begin, plan.config.block)],
                refs["weights"].at[stage],
                refs["full"].at[stage],
            )

        lax.fori_loop(0, plan.blocks, copy_block, None)

    lax.fori_loop(0, work.num_items, copy_item, None)
    # Every barrier must have completed its last phase.
    for i in range(plan.stages):
        wait_until_free("free", work.num_items * plan.blocks + i, plan.stages)
    for i in range(SLOTS):
        wait_until_free("scales_free", work.num_items + i, SLOTS)


def _multiply_items(plan: Plan, work: _Work, x: Any, out: Any, refs: Any) -> None:
    """All items: this warpgroup takes every so manieth block, counted over items."""
    consumers, warpgroup = plan.config.consumers, lax.axis_index("warpgroup")
    store_x(
        x,
        work.split * plan.split_depth,
        refs["rows"],
        threads=128 * consumers,
        warpgroup=warpgroup,
        interpret=plan.interpret,
    )
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs["x_stored"])
    plgpu.barrier_wait(refs["x_stored"])

    def multiply_item(item: Array, carry: None) -> None:
        slot = lax.rem(item, SLOTS)
        plgpu.barrier_wait(refs["scales_full"].at[slot])
        begin = item * plan.blocks
        own = lax.rem(warpgroup - lax.rem(begin, consumers) + consumers, consumers)

        def multiply_block(i: Array, sums: Array) -> Array:
            block = own + i * consumers
            stage = lax.rem(begin + block, plan.stages)
            plgpu.barrier_wait(refs["full"].at[stage])
            return _add_block(plan, sums, stage, block, slot, refs)

        zeros = plgpu.layout_cast(jnp.zeros((TILE, plan.padded), jnp.float32), plgpu.Layout.WGMMA)
        count = (plan.blocks - own + consumers - 1) // consumers
        sums = lax.fori_loop(0, count, multiply_block, zeros)
        plgpu.barrier_arrive(refs["scales_free"].at[slot])
        _store_item(plan, work, item, sums, out, refs)

    lax.fori_loop(0, work.num_items, multiply_item, None)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup > 0)
    def _():
        if consumers > 1:
            plgpu.barrier_wait(refs["sums_free"].at[warpgroup - 1])


def _add_block(
    plan: Plan, sums: Array, stage: Array, block: Array, slot: Array, refs: Any
) -> Array:
    """Add the product of a block to the sums [64, N]. The stage is freed.

    The weights of the next group are converted while the tensor cores multiply those of a group.
    """
    config, unit = plan.config, plan.unit
    steps = config.block // plan.step
    units = plan.step // unit

    def by_output(name: str, step: int) -> Array:
        group = (block * config.block + step * plan.step) // plan.group
        return plgpu.load(refs[name].at[slot, group], layout=_BY_OUTPUT, optimized=False)

    def weights_of(step: int) -> list[Array]:
        bias = jnp.bfloat16(BIAS)
        if plan.zeros:
            bias = by_output("zeros", step) + bias
            bias = lax.broadcast_in_dim(bias, (TILE, unit), (0,))
        starts = [step * plan.step + i * unit for i in range(units)]
        ref = refs["weights"].at[stage]
        return [load_weights(ref, start, unit, interpret=plan.interpret) - bias for start in starts]

    weights = weights_of(0)
    for step in range(steps):
        chunk = (block * config.block + step * plan.step) // unit
        rows = [refs["rows"].at[chunk + i] for i in range(units)]
        last = step == steps - 1

        def meanwhile(step: int = step, last: bool = last) -> tuple[Array, list[Array]]:
            return by_output("scales", step), [] if last else weights_of(step + 1)

        product, (scale, weights) = _multiply_step(plan, weights, rows, meanwhile)
        if step == max(steps - 2, 0):  # the last weights have been loaded
            plgpu.barrier_arrive(refs["free"].at[stage])
        scale = lax.broadcast_in_dim(scale.astype(jnp.float32), sums.shape, (0,))
        sums += product * scale
    return sums


def _multiply_step(
    plan: Plan, weights: list[Array], rows: list[Any], meanwhile: Callable[[], Any]
) -> tuple[Array, Any]:
    """Weights [64, unit] times rows [N, unit], summed over both lists: [64, N].

    Also what ``meanwhile`` returns, which is called while the tensor cores multiply.
    """
    if plan.interpret:  # the interpreter does not take weights from registers
        products = [
            one.astype(jnp.float32) @ some[...].astype(jnp.float32).T
            for one, some in zip(weights, rows, strict=True)
        ]
        return functools.reduce(jnp.add, products), meanwhile()

    def multiply(acc: Any) -> tuple[Array, Any]:
        for one, some in zip(weights, rows, strict=True):
            plgpu.wgmma(acc, one, some.transpose((1, 0)))
        following = meanwhile()
        return acc[...], following  # reading the accumulator waits

    sums = plgpu.WGMMAAccumulatorRef((TILE, plan.padded), jnp.float32)
    return pl.run_scoped(multiply, sums)


def _store_item(plan: Plan, work: _Work, item: Array, sums: Array, out: Any, refs: Any) -> None:
    """Add up the warpgroups' sums [64, N] in the first one, and store their rows."""
    warpgroup, others = lax.axis_index("warpgroup"), plan.config.consumers - 1
    if others:

        @pl.when(warpgroup > 0)
        def _hand_over():
            @pl.when(item > 0)
            def _():
                plgpu.barrier_wait(refs["sums_free"].at[warpgroup - 1])

            _write(refs["sums"].at[warpgroup - 1], sums)
            plgpu.barrier_arrive(refs["sums_full"].at[warpgroup - 1])

    @pl.when(warpgroup == 0)
    def _store():
        total = sums
        for other in range(others):
            plgpu.barrier_wait(refs["sums_full"].at[other])
            ref = refs["sums"].at[other]
            total += plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.barrier_arrive(refs["sums_free"].at[other])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        by_row = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        _write(refs["out"].at[0].transpose((1, 0)), by_row)
        plgpu.commit_smem()
        outputs = pl.ds(work.first_output(plan, item), TILE)
        plgpu.copy_smem_to_gmem(
            refs["out"].at[0, pl.ds(0, plan.rows)], out.at[work.split, :, outputs]
        )


def _write(ref: Any, value: Array) -> None:
    """Store to plain shared memory. jax 0.12 has to be told that bank conflicts are allowed."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
