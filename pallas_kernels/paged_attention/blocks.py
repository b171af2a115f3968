"""Blocks of keys and values on their way to shared memory, for the kernel in mosaic_gpu.py.

The kernel of latent attention calls some of these with a plan and work of its own.

Pages of bytes (see float8.py) are copied to rings of their own. The producer warpgroup widens each
block in registers, to bfloat16, and writes it to the ring that the compute warpgroups read. So
these, and what tensor cores multiply, are the same for all pages; only half as many bytes are read.
"""

from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.plan import AttentionPlan, Work
from pallas_kernels.paged_attention.widening import widen
from pallas_kernels.shared_memory import zero_rows_outside


def block_pages(plan: Any, work: Any, table: Any, block: Array) -> tuple[Array, ...]:
    """Pages that a block lies in; past the page table, its last one."""
    column = block * plan.config.block // plan.page_size
    last = plan.columns - 1
    return tuple(
        table[work.sequence, jnp.minimum(column + i, last)] for i in range(plan.pages_of_block)
    )


def copy_block(
    plan: Any,
    work: Any,
    source: Any,
    ring: Any,
    full: Any,
    block: Array,
    slot: Array,
    indices: Any,
) -> None:
    """Start to copy a block of some pages' keys or values to a ring's ``slot``."""
    for head in range(plan.config.heads):
        copy_head(plan, source, work.first_head + head, ring.at[slot, head], full, block, indices)


def copy_head(
    plan: Any, source: Any, head: Any, to: Any, full: Any, block: Array, indices: Any
) -> None:
    """Start to copy one head's rows of a block to ``to`` [block, D]."""
    size = plan.config.block
    rows = min(size, plan.page_size)
    offset = block * size % plan.page_size if plan.page_size > size else 0
    for i, page in enumerate(indices):
        plgpu.copy_gmem_to_smem(
            source.at[page, head, pl.ds(offset, rows)], to.at[pl.ds(i * rows, rows)], full
        )


def wait_until_free(plan: Any, refs: Any, name: str, index: Array) -> None:
    """Wait until the ring of ``name`` can take its block number ``index``."""

    @pl.when(index >= plan.config.stages)
    def _():
        plgpu.barrier_wait(refs[f"{name}_free"].at[lax.rem(index, plan.config.stages)])


def wait_until_all_free(plan: Any, refs: Any, names: Sequence[str], num_blocks: Array) -> None:
    """Every barrier must have completed its last phase when the kernel ends."""
    for i in range(plan.config.stages):
        for name in names:
            wait_until_free(plan, refs, name, num_blocks + i)


def produce_blocks(plan: AttentionPlan, work: Work, table: Any, k: Any, v: Any, refs: Any) -> None:
    """Copy the blocks in order into the ring. Page indices are read one block ahead."""
    config = plan.config

    def produce(block: Array, indices: tuple[Array, ...]) -> tuple[Array, ...]:
        following = block_pages(plan, work, table, block + 1)
        index = block - work.start
        slot = lax.rem(index, config.stages)
        if plan.has_left_edge:  # once copies for the whole ring have been issued
            clean_left_edge(index == config.stages)
        for (source, ring), name, barrier in (
            (k, "k", slot),
            (v, "v", work.values_barrier(block, slot)),
        ):
            wait_until_free(plan, refs, name, index)
            full = refs[f"{name}_full"].at[barrier]
            copy_block(plan, work, source, ring, full, block, slot, indices)
        return following

    def clean_left_edge(now: Array) -> None:
        @pl.when(now & work.is_left_edge(work.start))
        def _():
            _clean_values(plan, work, work.start, jnp.int32(1), refs)

    lax.fori_loop(work.start, work.stop, produce, block_pages(plan, work, table, work.start))
    num_blocks = work.stop - work.start
    if plan.has_left_edge:
        clean_left_edge((num_blocks > 0) & (num_blocks <= config.stages))

    @pl.when((num_blocks > 0) & work.is_right_edge(work.stop - 1))
    def _clean_right_edge():
        _clean_values(plan, work, work.stop - 1, jnp.int32(0), refs)

    wait_until_all_free(plan, refs, ("k", "v"), num_blocks)


def _clean_values(plan: AttentionPlan, work: Work, block: Array, edge: Array, refs: Any) -> None:
    """Overwrite a block's values in slots that no query sees with zeros, once they are loaded."""
    plgpu.barrier_wait(refs["v_full"].at[plan.config.stages + edge])
    slot = lax.rem(block - work.start, plan.config.stages)
    start = block * plan.config.block
    for head in range(plan.config.heads):
        zero_rows_outside(
            refs["v"].at[slot, head],
            work.first - start,
            work.kv_len - start,
            interpret=plan.interpret,
        )
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs["v_cleaned"].at[edge])


def produce_wide_blocks(
    plan: AttentionPlan, work: Work, table: Any, k: Any, v: Any, refs: Any
) -> None:
    """Copy blocks of bytes in order into their rings, ``byte_stages`` ahead, and widen them.

    Values that no query sees are overwritten with zeros, as they may be NaN.
    """
    config, byte_stages = plan.config, plan.config.byte_stages
    rings = (("k", k), ("v", v))

    def copy(name: str, source: Any, block: Array, indices: Any) -> None:
        slot = lax.rem(block - work.start, byte_stages)
        arrived = refs[f"{name}_arrived"].at[slot]
        copy_block(plan, work, source, refs[f"{name}_bytes"], arrived, block, slot, indices)

    def begin(block: Array, indices: Any) -> Any:
        following = block_pages(plan, work, table, block + 1)
        for name, (source, _) in rings:
            copy(name, source, block, indices)
        return following

    def produce(block: Array, indices: Any) -> Any:
        """``indices``: of the block that is ``byte_stages`` after this one."""
        following = block_pages(plan, work, table, block + byte_stages + 1)
        index = block - work.start
        slot, byte_slot = lax.rem(index, config.stages), lax.rem(index, byte_stages)
        for name, (source, ring) in rings:
            plgpu.barrier_wait(refs[f"{name}_arrived"].at[byte_slot])
            wait_until_free(plan, refs, name, index)
            for head in range(config.heads):
                narrow = refs[f"{name}_bytes"].at[byte_slot, head]
                widen(narrow, ring.at[slot, head], interpret=plan.interpret)
            if name == "v":
                _clean(plan, work, block, ring.at[slot])
            plgpu.commit_smem()  # all threads have read the bytes, too
            plgpu.barrier_arrive(refs[f"{name}_full"].at[slot])

            @pl.when(block + byte_stages < work.stop)
            def _(name=name, source=source):
                copy(name, source, block + byte_stages, indices)

        return following

    first = block_pages(plan, work, table, work.start)
    begun = jnp.minimum(work.start + byte_stages, work.stop)
    indices = lax.fori_loop(work.start, begun, begin, first)
    lax.fori_loop(work.start, work.stop, produce, indices)
    wait_until_all_free(plan, refs, ("k", "v"), work.stop - work.start)


def _clean(plan: AttentionPlan, work: Work, block: Array, values: Any) -> None:
    """Overwrite a block's values [heads, block, D] in slots that no query sees with zeros."""

    @pl.when(work.is_left_edge(block) | work.is_right_edge(block))
    def _():
        plgpu.commit_smem()  # they have all been written
        start = block * plan.config.block
        for head in range(plan.config.heads):
            zero_rows_outside(
                values.at[head],
                work.first - start,
                work.kv_len - start,
                interpret=plan.interpret,
            )
