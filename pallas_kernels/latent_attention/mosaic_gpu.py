"""Latent attention on Hopper GPUs: flash attention whose keys and values are the same rows.

A thread block (CTA) handles 64 query rows, heads of a few tokens, of one sequence. A producer
warpgroup copies blocks of stored vectors by TMA into a ring in shared memory; each is read once, as
keys and as values. The output is too wide for the registers of one warpgroup, so two have half of
its columns each. The first, which leads, also computes scores and softmax. It hands weights of a
block, and by what earlier ones decay, to the other through shared memory. (The division of work is
that of FlashMLA, https://github.com/deepseek-ai/FlashMLA.)

There are few tiles of rows in small batches: then several CTAs share a context, and their parts of
the softmax are merged by XLA.

Rows that no query sees may hold NaN. A weight of 0 would not remove it (0 x NaN is NaN). Such rows
lie only in the first and the last block of a context. There the second warpgroup overwrites them
with zeros while the first computes scores, which the mask replaces.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.latent_attention.plan import LatentPlan, Work
from pallas_kernels.latent_attention.tuning import LatentTuning, latent_tuning
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.paged_attention.blocks import (
    block_pages,
    copy_head,
    wait_until_all_free,
    wait_until_free,
)
from pallas_kernels.paged_attention.parts import PartialAttention, merge_partials
from pallas_kernels.paged_attention.rows import (
    LOWEST_PEAK,
    MASKED,
    TINY,
    by_row,
    filled,
    load_words,
    product,
    row_load,
    slots_from,
    softmax_step,
    visible,
    words_of_rows,
    write,
)
from pallas_kernels.paged_attention.tuning import ROWS
from pallas_kernels.pages import QueryContext
from pallas_kernels.shared_memory import SWIZZLED, swizzled, zero_rows_outside

LEADER, FOLLOWER, PRODUCER = range(3)  # warpgroups
LN_2 = math.log(2)


# Traced once for all layers of a model: building and compiling the kernel takes seconds.
@functools.partial(
    jax.jit, static_argnames=("latent", "scale", "first_slot", "config", "interpret")
)
def latent_attention_mosaic(
    q: Array,  # [B, T, Q, L + R]
    pages: Array,  # [P, 1, K, L + R]
    context: QueryContext,
    *,
    latent: int,
    scale: float,
    first_slot: int = 0,
    config: LatentTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.latent_attention.latent_attention; only for what ``misfit`` accepts.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    batch, num_tokens, heads, stored = q.shape
    page_table, context_lens, _, ancestors, _ = context
    page_size, columns = pages.shape[2], page_table.shape[1]
    if config is None:
        tiles = -(-num_tokens * heads // ROWS)
        config = latent_tuning(batch, tiles, columns * page_size)
    plan = LatentPlan(
        batch=batch,
        num_tokens=num_tokens,
        heads=heads,
        stored=stored,
        latent=latent,
        page_size=page_size,
        columns=columns,
        words=1 if ancestors is None else ancestors.shape[-1],
        causal=ancestors is None,
        first_slot=first_slot,
        scale=scale,
        config=config,
        interpret=interpret is not None,
    )
    row = np.arange(plan.tiles * ROWS).reshape(plan.tiles, ROWS)
    token_of_row = np.minimum(row // heads, num_tokens - 1)
    words = words_of_rows(ancestors, token_of_row, batch)
    rows = q.reshape(batch, plan.rows, stored)
    outputs = _make_kernel(plan, q.dtype, interpret)(
        rows, pages, page_table, context_lens, context.ends, words
    )
    out = outputs[0].reshape(config.splits, batch, num_tokens, heads, latent)
    if config.splits == 1:
        return out[0]
    log_sums = outputs[1].reshape(config.splits, batch, -1)[..., : plan.rows]
    log_sums = log_sums.reshape(out.shape[:-1])
    parts = PartialAttention(out, log_sums, jnp.ones_like(log_sums))
    return merge_partials(parts).astype(q.dtype)


def _make_kernel(plan: LatentPlan, dtype: Any, interpret: Any) -> Any:
    config = plan.config
    out_dtype = jnp.dtype(dtype if config.splits == 1 else jnp.float32)
    outer = (config.splits, plan.batch)
    out_types = [jax.ShapeDtypeStruct((*outer, plan.rows, plan.latent), out_dtype)]
    if config.splits > 1:
        out_types.append(jax.ShapeDtypeStruct((*outer, plan.tiles, ROWS), jnp.float32))

    @fixed_name(interpret)
    def latent_attention_kernel(
        q, pages, table, context_lens, kv_lens, row_words, *outputs, ring_or_rows, **refs
    ):
        (refs["kv"],), (refs["rows"],) = ring_or_rows
        work = Work(plan, context_lens, kv_lens)
        warpgroup = kernel_axes.index("warpgroup")

        @pl.when(warpgroup == PRODUCER)
        def _produce():
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            _copy_queries(plan, work, q, refs)
            _produce_blocks(plan, work, table, pages, refs)

        @pl.when(warpgroup == LEADER)
        def _lead():
            plgpu.set_max_registers(config.registers, action="increase")
            words = load_words(plan, work, row_words, work.tile)
            acc, log_sum = _lead_blocks(plan, work, words, refs)
            if config.splits > 1:
                _store_log_sums(work, log_sum, outputs[1], refs)
            _store(plan, work, acc, outputs[0], LEADER, refs)

        @pl.when(warpgroup == FOLLOWER)
        def _follow():
            plgpu.set_max_registers(config.registers, action="increase")
            acc = _follow_blocks(plan, work, refs)
            _store(plan, work, acc, outputs[0], FOLLOWER, refs)

    return plgpu.kernel(
        latent_attention_kernel,
        out_type=out_types,
        scratch_types=_scratch(plan, dtype, out_dtype),
        grid=(plan.tiles, config.splits, plan.batch),
        grid_names=kernel_axes.names("tile", "split", "sequence"),
        num_threads=3,
        thread_name=kernel_axes.name("warpgroup"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows are reduced in registers
        ),
        interpret=interpret,
    )


def _scratch(plan: LatentPlan, dtype: Any, out_dtype: jnp.dtype) -> dict[str, Any]:
    """The memory of a CTA, and its barriers."""
    config = plan.config

    def swizzled_rows(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)

    def ring_or_rows() -> Any:
        """Rows of the output take the place of the last blocks."""
        line = 128 // out_dtype.itemsize
        rows = plgpu.SMEM(
            (2, ROWS, plan.half), out_dtype, transforms=swizzled(line, 8 * out_dtype.itemsize)
        )
        ring = swizzled_rows(config.stages, config.block, plan.stored)
        # The interpreter knows no unions.
        return [[ring], [rows]] if plan.interpret else plgpu.RefUnion([ring], [rows])

    return {
        "queries": swizzled_rows(ROWS, plan.stored),
        "ring_or_rows": ring_or_rows(),
        "weights": swizzled_rows(ROWS, config.block),
        "decay": plgpu.SMEM((ROWS,), jnp.float32),
        "log_sums": plgpu.SMEM((ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=ROWS // plan.unit),
        "kv_full": plgpu.Barrier(num_arrivals=plan.pages_of_block, num_barriers=config.stages),
        "kv_free": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "cleaned": plgpu.Barrier(),
        "weights_full": plgpu.Barrier(),
        "weights_free": plgpu.Barrier(),
        "all_read": plgpu.Barrier(num_arrivals=2),
    }


def _copy_queries(plan: LatentPlan, work: Work, q: Any, refs: Any) -> None:
    """Copy the tile's rows. Those past the sequence's last row are copies of others."""
    for first in range(0, ROWS, plan.unit):
        start = jnp.minimum(work.tile * ROWS + first, plan.rows - plan.unit)
        plgpu.copy_gmem_to_smem(
            q.at[work.sequence, pl.ds(start, plan.unit)],
            refs["queries"].at[pl.ds(first, plan.unit)],
            refs["q_full"],
        )


def _produce_blocks(plan: LatentPlan, work: Work, table: Any, pages: Any, refs: Any) -> None:
    """Copy the blocks in order into the ring. Page indices are read one block ahead."""

    def produce(block: Array, indices: tuple[Array, ...]) -> tuple[Array, ...]:
        following = block_pages(plan, work, table, block + 1)
        index = block - work.start
        slot = lax.rem(index, plan.config.stages)
        wait_until_free(plan, refs, "kv", index)
        copy_head(plan, pages, 0, refs["kv"].at[slot], refs["kv_full"].at[slot], block, indices)
        return following

    lax.fori_loop(work.start, work.stop, produce, block_pages(plan, work, table, work.start))
    wait_until_all_free(plan, refs, ["kv"], work.stop - work.start)


def _lead_blocks(
    plan: LatentPlan, work: Work, words: list[Array], refs: Any
) -> tuple[Array, Array]:
    """Online softmax over the CTA's blocks, and the first half of the output's columns: normalized
    [ROWS, L / 2], and the log-sum-exps [ROWS]."""
    size = plan.config.block
    scale = plan.scale * math.log2(math.e)  # exponentials are powers of 2

    def masked(block: Array, scores: Array) -> Array:
        seen = visible(plan, work, slots_from(block * size, size), words)
        return jnp.where(seen, scores, MASKED)

    def step(block: Array, carry: Any) -> Any:
        acc, peak, total = carry
        slot = lax.rem(block - work.start, plan.config.stages)
        plgpu.barrier_wait(refs["kv_full"].at[slot])
        rows = refs["kv"].at[slot]
        scores = product(refs["queries"], rows.transpose((1, 0)), interpret=plan.interpret)
        scores = lax.cond(
            work.all_see(block), lambda: scores, functools.partial(masked, block, scores)
        )
        exps, decay, peak = softmax_step(scores, scale, peak)
        total = total * decay + jnp.sum(exps, axis=1)
        weights = exps.astype(rows.dtype)
        # First: once it has the weights, the follower might clean another block.
        pl.when(work.is_edge(block))(lambda: plgpu.barrier_wait(refs["cleaned"]))
        pl.when(block > work.start)(lambda: plgpu.barrier_wait(refs["weights_free"]))
        refs["weights"][...] = weights
        _hand_over(decay, refs)
        acc = acc * by_row(decay, plan.half)
        values = rows.at[:, pl.ds(0, plan.half)]
        acc = product(weights, values, acc, interpret=plan.interpret)
        plgpu.barrier_arrive(refs["kv_free"].at[slot])
        return acc, peak, total

    carry = filled((ROWS, plan.half), 0.0), filled((ROWS,), LOWEST_PEAK), filled((ROWS,), 0.0)
    plgpu.barrier_wait(refs["q_full"])
    acc, peak, total = lax.fori_loop(work.start, work.stop, step, carry)
    total = jnp.maximum(total, TINY)
    pl.when(work.stop > work.start)(lambda: plgpu.barrier_wait(refs["weights_free"]))
    _hand_over(1 / total, refs)
    return acc * by_row(1 / total, plan.half), LN_2 * (peak + jnp.log2(total))


def _hand_over(factor: Array, refs: Any) -> None:
    """Tell the follower by what to multiply its rows; the block's weights are written."""
    write(refs["decay"], factor)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs["weights_full"])


def _follow_blocks(plan: LatentPlan, work: Work, refs: Any) -> Array:
    """The second half of the output's columns: normalized [ROWS, L / 2]."""

    def step(block: Array, acc: Array) -> Array:
        slot = lax.rem(block - work.start, plan.config.stages)
        plgpu.barrier_wait(refs["kv_full"].at[slot])

        @pl.when(work.is_edge(block))
        def _clean():
            start = block * plan.config.block
            zero_rows_outside(
                refs["kv"].at[slot],
                plan.first_slot - start,
                work.end - start,
                interpret=plan.interpret,
            )
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs["cleaned"])

        acc = received(acc)
        values = refs["kv"].at[slot, :, pl.ds(plan.half, plan.half)]
        acc = product(refs["weights"], values, acc, interpret=plan.interpret)
        plgpu.barrier_arrive(refs["weights_free"])
        plgpu.barrier_arrive(refs["kv_free"].at[slot])
        return acc

    def received(acc: Array) -> Array:
        plgpu.barrier_wait(refs["weights_full"])
        return acc * by_row(row_load(refs["decay"]), plan.half)

    return received(lax.fori_loop(work.start, work.stop, step, filled((ROWS, plan.half), 0.0)))


def _store(plan: LatentPlan, work: Work, acc: Array, out: Any, half: int, refs: Any) -> None:
    """A warpgroup's columns, from registers through shared memory to the output."""
    plgpu.barrier_arrive(refs["all_read"])
    plgpu.barrier_wait(refs["all_read"])  # no one reads the last blocks any more
    columns, rows = pl.ds(half * plan.half, plan.half), refs["rows"].at[half]
    rows[...] = acc.astype(rows.dtype)
    plgpu.commit_smem()
    for first in range(0, ROWS, plan.unit):
        row = work.tile * ROWS + first

        @pl.when(row < plan.rows)
        def _(first=first, row=row):
            plgpu.copy_smem_to_gmem(
                rows.at[pl.ds(first, plan.unit)],
                out.at[work.split, work.sequence, pl.ds(row, plan.unit), columns],
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the kernel's end waits for the rest


def _store_log_sums(work: Work, log_sum: Array, out: Any, refs: Any) -> None:
    """The tile's log-sum-exps to the output; _store waits for it."""
    write(refs["log_sums"], log_sum)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs["log_sums"], out.at[work.split, work.sequence, work.tile])
