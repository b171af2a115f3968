"""Rows that a warpgroup has computed on their way to the output, for the kernel in mosaic_gpu.py.

If CTAs share a context, they merge their rows before.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import cluster, kernel_axes
from pallas_kernels.paged_attention.plan import AttentionPlan, Work
from pallas_kernels.paged_attention.rows import TINY, by_row, row_load, write
from pallas_kernels.paged_attention.tuning import ROWS

MERGED_ROWS = 32  # rows of all splits merged at a time; more would need more registers
LN_2 = math.log(2)


def store(
    plan: AttentionPlan, work: Work, state: Any, tile: Array, outputs: Sequence[Any], refs: Any
) -> None:
    acc, peak, total = state
    if plan.partial:
        _wait_for_others(plan, refs)
    rows = refs["out_rows"].at[kernel_axes.index("warpgroup")]
    total = jnp.maximum(total, TINY)
    if plan.large:
        plgpu.commit_smem()  # all warps have read their queries: rows take their place
    normalized = acc / by_row(total, plan.head_dim)
    for first in range(0, plan.head_dim, plan.stored_columns):
        some = _entries(normalized, first, plan.stored_columns)
        write(rows, some.astype(rows.dtype))
        if plan.partial and first == 0:
            log_sums = refs["row_log_sums"].at[kernel_axes.index("warpgroup")]
            write(log_sums, LN_2 * (peak + jnp.log2(total)))
        plgpu.commit_smem()
        if plan.partial and first == 0:
            _store_log_sums(work, tile, outputs[1], refs)
        _store_tokens(plan, work, rows, tile, (0, plan.tokens), outputs[0], first)


def _wait_for_others(plan: AttentionPlan, refs: Any) -> None:
    """Until no other warpgroup reads queries, keys or values: outputs take their place."""
    if plan.config.consumers > 1:
        plgpu.barrier_arrive(refs["all_read"])
        plgpu.barrier_wait(refs["all_read"])


def _store_log_sums(work: Work, tile: Array, log_sums: Any, refs: Any) -> None:
    """The tile's log-sum-exps from shared memory to the output; _store_tokens waits for it."""
    log_sums_here = refs["row_log_sums"].at[kernel_axes.index("warpgroup")]
    plgpu.copy_smem_to_gmem(log_sums_here, log_sums.at[work.output, work.kv_head, tile])


def _store_tokens(
    plan: AttentionPlan,
    work: Work,
    rows: Any,
    tile: Array,
    tokens: tuple[Any, Any],
    out: Any,
    column: int = 0,
) -> None:
    """Rows of the tile's tokens [first, first + count) from shared memory to the output's columns
    from ``column`` on; ``tokens``: first and count."""
    first, count = tokens
    width = rows.shape[-1]

    @pl.loop(0, count)
    def _copy(i):
        token = tile * plan.tokens + first + i

        @pl.when(token < plan.num_tokens)
        def _():
            plgpu.copy_smem_to_gmem(
                rows.at[pl.ds((first + i) * plan.group, plan.group)],
                _columns(
                    out.at[work.output, token, pl.ds(work.kv_head * plan.group, plan.group)],
                    column,
                    width,
                ),
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the kernel's end waits for the rest


def merge_and_store(
    plan: AttentionPlan, work: Work, state: Any, tile: Array, outputs: Sequence[Any], refs: Any
) -> None:
    """Merge the cluster's softmaxes. Each CTA merges and stores its share of the tile's tokens.

    Every CTA first writes its normalized output and its log-sum-exp to shared memory. The
    log-sum-exp is repeated for each entry of a row, so that both are read in the same layout, and
    one cluster barrier is enough. Those that are returned are merged by the first CTA.
    """
    splits, warpgroup = plan.config.splits, kernel_axes.index("warpgroup")
    rows, width = refs["out_rows"].at[warpgroup], plan.merged_columns
    split_out = [part.at[warpgroup, :, pl.ds(0, width)] for part in refs["split_out"]]
    log_sums = refs["log_sums"].at[warpgroup, :, pl.ds(0, plan.log_sum_columns)]
    _show_others(plan, state, split_out, log_sums, refs, warpgroup)
    share = -(-plan.tokens // splits)
    first = work.split * share
    count = jnp.clip(plan.tokens - first, 0, share)
    # The last shares overlap where they would otherwise exceed the tile.
    begin = jnp.minimum(first, plan.tokens - share)

    @pl.when(count > 0)
    def _merge():
        columns = plan.log_sum_columns  # at a time
        num_rows = _merged_rows(plan, share * plan.group)
        most = MERGED_ROWS // splits * (width // columns)  # rows at a time
        for column in range(0, plan.head_dim, columns):
            part = _columns(split_out[column // width], column % width, columns)
            out = _columns(rows, column, columns)
            for start in range(0, num_rows, most):
                size = min(most, num_rows - start)
                span = pl.ds(_first_row(plan, begin, num_rows) + start, size)
                write(out.at[span], _merged(plan, part, log_sums, span).astype(rows.dtype))

    if plan.partial:

        @pl.when(work.split == 0)
        def _merge_log_sums():
            row_log_sums = refs["row_log_sums"].at[warpgroup]
            # No other CTA reads these.
            write(row_log_sums, LN_2 * _merged_log_sums(plan, row_log_sums))

    plgpu.commit_smem()  # makes the rows visible to TMA
    cluster.arrive()

    @pl.when(count > 0)
    def _store_share():
        if plan.partial:
            pl.when(work.split == 0)(lambda: _store_log_sums(work, tile, outputs[1], refs))
        _store_tokens(plan, work, rows, tile, (begin, share), outputs[0])

    cluster.wait()  # no CTA may exit before all have read its shared memory


def _show_others(
    plan: AttentionPlan,
    state: Any,
    split_out: Sequence[Any],
    log_sums: Any,
    refs: Any,
    warpgroup: Array,
) -> None:
    """Write a CTA's normalized output and its log-sum-exps to where the cluster's others read."""
    (acc, peak, total), width = state, plan.merged_columns
    _wait_for_others(plan, refs)
    if plan.large:
        plgpu.commit_smem()  # all warps have read keys and values
    total = jnp.maximum(total, TINY)
    normalized = acc / by_row(total, plan.head_dim)
    for index, part in enumerate(split_out):
        write(part, _entries(normalized, index * width, width))
    log_sum = peak + jnp.log2(total)
    write(log_sums, by_row(log_sum, plan.log_sum_columns))
    if plan.partial:
        write(refs["row_log_sums"].at[warpgroup], log_sum)
    cluster.sync()


def _merged_rows(plan: AttentionPlan, rows: int) -> int:
    """So many rows or a few more: all 128 threads take the same number of entries. With heads of 64
    that is a multiple of two rows, and with large heads 4 times a power of two, as jax 0.11 stores
    1, 2, 4 or 8 entries of a thread to rows that do not follow one another."""
    step = max(1, 128 // plan.log_sum_columns)
    if plan.large:
        return step << (-(-rows // step) - 1).bit_length()
    return -(-rows // step) * step


def _first_row(plan: AttentionPlan, begin: Array, num_rows: int) -> Array:
    """The first of ``num_rows`` that a CTA merges for its share, which begins at a token."""
    first = begin * plan.group
    return jnp.minimum(first, ROWS - num_rows) if plan.large else first


def _columns(ref: Any, first: int, count: int) -> Any:
    """Some columns of a ref [rows, columns]."""
    return ref if ref.shape[-1] == count else ref.at[:, pl.ds(first, count)]


def _entries(rows: Array, first: int, count: int) -> Array:
    """Some columns of an array [ROWS, columns]."""
    return rows if rows.shape[1] == count else lax.slice(rows, (0, first), (ROWS, first + count))


def _merged_log_sums(plan: AttentionPlan, log_sums: Any) -> Array:
    """The log-sum-exps of all CTAs together, in powers of 2: [ROWS]."""
    parts = [
        row_load(plgpu.cluster_ref(log_sums, {kernel_axes.name("split"): jnp.int32(i)}))
        for i in range(plan.config.splits)
    ]
    best = functools.reduce(jnp.maximum, parts)
    return best + jnp.log2(functools.reduce(jnp.add, [jnp.exp2(part - best) for part in parts]))


def _merged(plan: AttentionPlan, split_out: Any, log_sums: Any, span: Any) -> Array:
    """Rows ``span`` of some columns of all CTAs' outputs, weighted by their softmax sums: float32
    [rows, columns]."""

    layout = plgpu.Layout.WG_STRIDED((span.size, plan.log_sum_columns), vec_size=1)

    def peers(ref: Any) -> list[Array]:
        return [
            plgpu.load(
                plgpu.cluster_ref(ref, {kernel_axes.name("split"): jnp.int32(i)}).at[span],
                layout=layout,
            )
            for i in range(plan.config.splits)
        ]

    all_sums, outputs = peers(log_sums), peers(split_out)
    best = functools.reduce(jnp.maximum, all_sums)
    weights = [jnp.exp2(log_sum - best) for log_sum in all_sums]
    weighted = [output * weight for output, weight in zip(outputs, weights, strict=True)]
    return functools.reduce(jnp.add, weighted) / functools.reduce(jnp.add, weights)
