"""The online softmax of a compute warpgroup over its blocks, for the kernel in mosaic_gpu.py."""

import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.paged_attention.plan import AttentionPlan, Work
from pallas_kernels.paged_attention.rows import (
    LOWEST_PEAK,
    MASKED,
    by_row,
    capped,
    filled,
    product,
    slots_from,
    softmax_step,
    visible,
)
from pallas_kernels.paged_attention.tuning import ROWS

LOG2_E = math.log2(math.e)


def attend(
    plan: AttentionPlan, work: Work, words: list[Array], seen_from: Array | None, refs: Any
) -> tuple[Array, Array, Array]:
    """Online softmax over the CTA's blocks: (unnormalized output [ROWS, D], peak, sum [ROWS]).

    Two warpgroups on the same blocks tend to do the same work at the same time: both wait for the
    tensor cores, then both compute exponentials. With ping-pong scheduling (FlashAttention-3, arXiv
    2407.08608) they alternate: a warpgroup holds the tensor cores for the values of one block and
    the keys of the next, while the other computes exponentials.
    """
    config, warpgroup = plan.config, kernel_axes.index("warpgroup")
    q = refs["queries"].at[warpgroup]
    # Of the softmax, whose exponentials are powers of 2, or with a cap, of what is capped before.
    scale: Any = plan.scale * (LOG2_E if plan.softcap is None else 1)
    if plan.float8:
        scale = refs["k_scale"][work.kv_head] * scale

    def scores_with(keys: Any) -> Array:
        scores = product(q, keys, interpret=plan.interpret)
        return scores if plan.softcap is None else capped(scores, scale, plan.softcap)

    def scores_of(block: Array, slot: Array, *, masked: bool) -> Array:
        """[ROWS, block] scores of a block; without a cap, not yet scaled."""
        if not masked:
            keys = refs["k"].at[slot, work.own_head].transpose((1, 0))
            return scores_with(keys)
        # The mask needs registers beside the scores, so only half of the slots are done at a time.
        width, halves = config.block // 2, []
        for first in (0, width):
            keys = refs["k"].at[slot, work.own_head, pl.ds(first, width)].transpose((1, 0))
            slots = work.in_sequence(slots_from(block * config.block + first, width))
            seen = visible(plan, work, slots, words, seen_from)
            half = scores_with(keys)
            halves.append(jnp.where(seen, half, MASKED))
        return jnp.concatenate(halves, axis=1)

    def acquire_tensor_cores() -> None:
        if config.ping_pong:
            plgpu.barrier_wait(refs["tensor_cores"].at[warpgroup])

    def release_tensor_cores() -> None:
        if config.ping_pong:
            plgpu.barrier_arrive(refs["tensor_cores"].at[1 - warpgroup])

    def wait_for_values(block: Array, slot: Array, *, masked: bool) -> None:
        if not masked or plan.float8:
            plgpu.barrier_wait(refs["v_full"].at[slot])
            return
        barrier = work.values_barrier(block, slot)
        plgpu.barrier_wait(refs["v_full"].at[barrier])

        @pl.when(barrier >= config.stages)
        def _():
            plgpu.barrier_wait(refs["v_cleaned"].at[barrier - config.stages])

    def step(block: Array, carry: Any, *, masked: bool) -> Any:
        acc, peak, total = carry
        slot = lax.rem(block - work.start, config.stages)
        plgpu.barrier_wait(refs["k_full"].at[slot])
        scores = scores_of(block, slot, masked=masked)
        plgpu.barrier_arrive(refs["k_free"].at[slot])
        release_tensor_cores()
        exps, decay, peak = softmax_step(scores, scale if plan.softcap is None else LOG2_E, peak)
        acc = acc * by_row(decay, plan.head_dim)
        total = total * decay + jnp.sum(exps, axis=1)
        weights = exps.astype(refs["v"].dtype)
        wait_for_values(block, slot, masked=masked)
        acquire_tensor_cores()
        values = refs["v"].at[slot, work.own_head]
        acc = product(weights, values, acc, interpret=plan.interpret)
        plgpu.barrier_arrive(refs["v_free"].at[slot])
        return acc, peak, total

    def blocks(low: Array, high: Array, carry: Any, *, masked: bool) -> Any:
        return lax.fori_loop(
            low, high, lambda block, carry: step(block, carry, masked=masked), carry
        )

    if config.ping_pong:  # warpgroup 0 goes first
        pl.when(warpgroup == 1)(acquire_tensor_cores)
    carry = (
        filled((ROWS, plan.head_dim), 0.0),
        filled((ROWS,), LOWEST_PEAK),
        filled((ROWS,), 0.0),
    )
    tail = jnp.clip(work.all_see_to // config.block, work.start, work.stop)
    middle = work.start
    if plan.has_left_edge:
        all_seen = (work.all_see_from + config.block - 1) // config.block
        middle = jnp.clip(all_seen, work.start, tail)
        carry = blocks(work.start, middle, carry, masked=True)
    carry = blocks(middle, tail, carry, masked=False)
    carry = blocks(tail, work.stop, carry, masked=True)
    if config.ping_pong:  # each barrier needs as many arrivals as waits
        pl.when(warpgroup == 0)(release_tensor_cores)
    if plan.float8:
        carry = (carry[0] * refs["v_scale"][work.kv_head], *carry[1:])
    return carry
