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

from pallas_kernels.packed_product.places import BIAS
from pallas_kernels.packed_product.registers import (
    load_weights,
    store_x,
    weights_layout,
    x_layout,
)
from pallas_kernels.packed_product.tuning import (
    BARRIER_BYTES,
    DEFAULT,
    SHARED_BYTES,
    TILE,
    ProductTuning,
    groups_of,
    padded_rows,
)

SLOTS = 2  # items whose scales are in shared memory
SCALES_STEP = 8  # scales of 16 bits in 16 bytes, the least that TMA copies
PRODUCER_REGISTERS, REGISTERS = 40, 232  # of a thread, with two consumers
_BY_OUTPUT = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of a call."""

    rows: int
    depth: int
    width: int
    num_groups: int  # groups of inputs that share a scale
    zeros: bool
    splits: int
    scale_dtype: Any
    config: ProductTuning
    interpret: bool

    @property
    def by_group(self) -> tuple[str, ...]:
        """What is copied for each group of an output."""
        return ("scales", "zeros") if self.zeros else ("scales",)

    @property
    def padded(self) -> int:
        return padded_rows(self.rows)

    @property
    def split_depth(self) -> int:
        return self.depth // self.splits

    @property
    def blocks(self) -> int:
        """Blocks of an item."""
        return self.split_depth // self.config.block

    @property
    def group(self) -> int:
        return self.depth // self.num_groups

    @property
    def step(self) -> int:
        """Inputs that are summed before the sum is scaled: a group, or its part in a block."""
        return min(self.group, self.config.block)

    @property
    def unit(self) -> int:
        """Inputs of one call of wgmma: a swizzled line of x holds so many."""
        return min(self.step, 64)

    @property
    def share(self) -> int:
        """CTAs that share the items of a split."""
        return groups_of(self.splits, self.width)

    @property
    def tiles(self) -> int:
        return self.width // TILE

    @property
    def scales(self) -> int:
        """Scales of a row that are copied for an item, from a multiple of 8 on; 1 of one group."""
        of_split = -(-self.split_depth // self.group)
        if self.num_groups == 1 or of_split % SCALES_STEP == 0:
            return of_split
        return min(-(-(of_split + SCALES_STEP - 1) // SCALES_STEP) * SCALES_STEP, self.num_groups)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return (TILE,) if self.num_groups == 1 else (TILE, self.scales)

    @property
    def other_bytes(self) -> int:
        """Shared memory but for weights."""
        scales = len(self.by_group) * SLOTS * TILE * self.scales * 2
        sums = self.config.consumers * TILE * self.padded * 4  # one of them to be stored
        return 2 * self.padded * self.split_depth + scales + sums + BARRIER_BYTES

    @property
    def stages(self) -> int:
        """Blocks of weights in flight."""
        room = (SHARED_BYTES - self.other_bytes) // self.config.stage_bytes
        stages = min(room, self.config.most_stages)
        return stages // self.config.consumers * self.config.consumers

    def check(self) -> None:
        """Raises ValueError for a tuning that does not suit the call."""
        if self.split_depth % self.config.block:
            raise ValueError(f"splits of {self.split_depth} in blocks of {self.config.block}")
        if not self.stages:
            raise ValueError(f"{self.other_bytes} bytes of shared memory leave none to weights")


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("num_splits", "config", "interpret"))
def packed_product_mosaic(
    x: Array,  # [M, in]
    values: Array,  # [out, in]
    scale: Array,  # [out, in / group]
    zero: Array | None,
    *,
    num_splits: int,
    config: ProductTuning = DEFAULT,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.packed_product.packed_product; only for what ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    width, num_groups = scale.shape
    plan = _Plan(
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
    if num_groups == 1:
        by_group = [one.reshape(-1) for one in by_group]
    return _make_kernel(plan, interpret)(x, values, *by_group)


def _make_kernel(plan: _Plan, interpret: Any) -> Any:
    config, stages = plan.config, plan.stages
    sums = (TILE, plan.padded)

    def scratch() -> dict[str, Any]:
        x_shape = (plan.split_depth // plan.unit, plan.padded, plan.unit)
        scales_shape = (SLOTS, *plan.scales_shape)
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

    def packed_product_kernel(x, values, scale, *zero_and_out, **refs):
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
        packed_product_kernel,
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

    def first_output(self, plan: _Plan, item: Array) -> Array:
        return (self.first + item * plan.share) * TILE

    def first_scale(self, plan: _Plan) -> Array:
        """The first group whose scale is copied."""
        group = self.split * plan.split_depth // plan.group
        aligned = group // SCALES_STEP * SCALES_STEP
        return jnp.minimum(aligned, plan.num_groups - plan.scales)


def _copy_weights(plan: _Plan, work: _Work, values: Any, by_group: list[Any], refs: Any) -> None:
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
            if plan.num_groups > 1:
                source = source.at[outputs, pl.ds(work.first_scale(plan), plan.scales)]
            else:
                source = source.at[outputs]
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


def _multiply_items(plan: _Plan, work: _Work, x: Any, out: Any, refs: Any) -> None:
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
    # Where the scales of this split start among those that are copied.
    skipped = work.split * plan.split_depth // plan.group - work.first_scale(plan)

    def multiply_item(item: Array, carry: None) -> None:
        slot = lax.rem(item, SLOTS)
        plgpu.barrier_wait(refs["scales_full"].at[slot])
        begin = item * plan.blocks
        own = lax.rem(warpgroup - lax.rem(begin, consumers) + consumers, consumers)

        def multiply_block(i: Array, sums: Array) -> Array:
            block = own + i * consumers
            stage = lax.rem(begin + block, plan.stages)
            plgpu.barrier_wait(refs["full"].at[stage])
            return _add_block(plan, sums, stage, block, slot, skipped, refs)

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
    plan: _Plan, sums: Array, stage: Array, block: Array, slot: Array, skipped: Array, refs: Any
) -> Array:
    """Add the product of a block to the sums [64, N]. The stage is freed.

    The weights of the next group are converted while the tensor cores multiply those of a group.
    """
    config, unit = plan.config, plan.unit
    steps = config.block // plan.step
    units = plan.step // unit

    def group_of(step: int) -> Array:
        return skipped + (block * config.block + step * plan.step) // plan.group

    def by_output(name: str, step: int) -> Array:
        ref = refs[name].at[slot]
        ref = ref if plan.num_groups == 1 else ref.at[:, group_of(step)]
        return plgpu.load(ref, layout=_BY_OUTPUT, optimized=False)

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
    plan: _Plan, weights: list[Array], rows: list[Any], meanwhile: Callable[[], Any]
) -> tuple[Array, Any]:
    """Weights [64, unit] times rows [N, unit], summed over both lists: [64, N].

    Also what ``meanwhile`` returns, which is called while the tensor cores multiply.
    """
    if plan.interpret:  # the interpreter does not take weights from registers
        pairs = zip(weights, rows, strict=True)
        return sum(
            w.astype(jnp.float32) @ x[...].astype(jnp.float32).T for w, x in pairs
        ), meanwhile()

    def multiply(acc: Any) -> tuple[Array, Any]:
        for one, some in zip(weights, rows, strict=True):
            plgpu.wgmma(acc, one, some.transpose((1, 0)))
        following = meanwhile()
        return acc[...], following  # reading the accumulator waits

    return pl.run_scoped(multiply, plgpu.ACC((TILE, plan.padded), jnp.float32))


def _store_item(plan: _Plan, work: _Work, item: Array, sums: Array, out: Any, refs: Any) -> None:
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
