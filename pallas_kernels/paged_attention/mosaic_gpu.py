"""Paged attention on Hopper GPUs: flash attention over pages, split over the context.

Each compute warpgroup of a thread block (CTA) handles 64 query rows: all query heads of one KV head
for a few tokens, so that a page is read once for all of them. A producer warpgroup looks up page
indices and copies keys and values by TMA into a ring of blocks in shared memory. If there are fewer
pairs of a sequence and a KV head than multiprocessors, a cluster of CTAs shares one context: each
attends to a range of it, and they merge their softmaxes through distributed shared memory. Or a
context has more parts than a cluster can have CTAs, and XLA merges them.

Rows of values that no query sees may hold NaN. A weight of 0 would not remove it (0 x NaN is NaN).
Such rows lie only in the first and the last block of a context. There the producer overwrites them
with zeros while the compute warpgroups are busy with scores. (Keys that no query sees need no such
care: the mask replaces their scores.)

Where sequences are spread over devices, pages hold a part of each page's slots, in the order of the
sequence. So those before any slot are a prefix of those that are here: blocks are made of the
slots that are here, and only the mask has to know where in the sequence they lie. Beside the part's
output, in float32, the kernel then returns the log-sum-exp of each query's scores.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import cluster, kernel_axes
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.paged_attention.attend import attend
from pallas_kernels.paged_attention.blocks import produce_blocks, produce_wide_blocks
from pallas_kernels.paged_attention.memory import named, scratch
from pallas_kernels.paged_attention.output import merge_and_store, store
from pallas_kernels.paged_attention.parts import (
    PartialAttention,
    merge_normalized,
    with_sinks,
)
from pallas_kernels.paged_attention.plan import AttentionPlan, Work, make_plan
from pallas_kernels.paged_attention.queries import load_queries
from pallas_kernels.paged_attention.rows import load_words, row_load, words_of_rows
from pallas_kernels.paged_attention.tuning import ROWS, AttentionTuning
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext


# Traced once for all layers of a model: building and compiling the kernel takes seconds.
@functools.partial(jax.jit, static_argnames=("options", "config", "interpret"))
def paged_attention_mosaic(
    q: Array,  # [B, T, Q, D]
    pages: LayerPages,
    context: QueryContext,
    sinks: Array | None = None,  # [Q]
    *,
    options: AttentionOptions,
    config: AttentionTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.paged_attention.paged_attention; only for what ``misfit`` accepts.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    if sinks is not None:  # the kernel gives the sums that the sinks' slot is added to
        whole, how = pages.k.shape[2], {"config": config, "interpret": interpret}
        given = q, pages, context, jnp.int32(0)
        part = partial_attention_mosaic(*given, page_size=whole, options=options, **how)
        found = with_sinks(part, sinks)
        return (found.weighted / found.total[..., None]).astype(q.dtype)
    plan = make_plan(q, pages, context, options, None, config, interpret)
    kernel = _make_kernel(plan, q.dtype, interpret)
    found = kernel(*_operands(plan, q, pages, context), *_scales(pages))
    return found if plan.config.parts == 1 else _merged_parts(plan, *found)[0].astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("page_size", "options", "config", "interpret"))
def partial_attention_mosaic(
    q: Array,  # [B, T, Q, D]
    pages: LayerPages,
    context: QueryContext,
    offset: Array,  # []
    *,
    page_size: int,
    options: AttentionOptions,
    config: AttentionTuning | None = None,
    interpret: Any = None,
) -> PartialAttention:
    """See pallas_kernels.paged_attention.partial; only for what ``misfit`` accepts.

    The output is normalized: ``peak`` is the log-sum-exp, and ``total`` is 1.
    """
    plan = make_plan(q, pages, context, options, page_size, config, interpret)
    kernel = _make_kernel(plan, q.dtype, interpret)
    found = kernel(*_operands(plan, q, pages, context), offset[None], *_scales(pages))
    out, log_sums = _merged_parts(plan, *found)
    return PartialAttention(out, log_sums, jnp.ones_like(log_sums))


def _operands(
    plan: AttentionPlan, q: Array, pages: LayerPages, context: QueryContext
) -> list[Array]:
    """The first operands of a kernel, those of its masks last."""
    masks = _row_masks(plan, context.positions, context.ancestors)
    return [
        *(q, pages.k, pages.v, context.page_table, context.context_lens, context.ends),
        *masks,
    ]


def _scales(pages: LayerPages) -> list[Array]:
    """The scales of keys and values, for pages of bytes."""
    return [scale for scale in (pages.k_scale, pages.v_scale) if scale is not None]


def _row_masks(plan: AttentionPlan, positions: Array, ancestors: Array | None) -> list[Array]:
    """The words of the rows' masks. With a window also the edges of each sequence's windows [B, 2],
    and the slot from which each row sees its context [B, tiles, ROWS]."""
    token_of_row = np.minimum(
        np.arange(plan.tiles)[:, None] * plan.tokens + np.arange(ROWS) // plan.group,
        plan.num_tokens - 1,
    )
    row_words = words_of_rows(ancestors, token_of_row, plan.batch)
    if plan.window is None:
        return [row_words]
    seen_from = positions - (plan.window - 1)
    edges = [seen_from.min(axis=1), seen_from.max(axis=1)]
    return [row_words, jnp.stack(edges, axis=1), seen_from[:, token_of_row]]


def _by_token(plan: AttentionPlan, rows: Array) -> Array:
    """A value per row of each tile [B, G, tiles, ROWS] as one per query [B, T, Q]."""
    used, batch = rows[..., : plan.tokens * plan.group], len(rows)
    by_token = used.reshape(batch, plan.kv_heads, -1, plan.group)[:, :, : plan.num_tokens]
    return by_token.swapaxes(1, 2).reshape(batch, plan.num_tokens, -1)


def _merged_parts(plan: AttentionPlan, out: Array, log_sums: Array) -> tuple[Array, Array]:
    """A call's outputs for each query: float32 [B, T, Q, D], and log-sum-exps [B, T, Q]."""
    log_sums = _by_token(plan, log_sums)
    if plan.config.parts == 1:
        return out, log_sums
    out, log_sums = (
        x.reshape(plan.batch, -1, *x.shape[1:]).swapaxes(0, 1) for x in (out, log_sums)
    )
    return merge_normalized(out, log_sums)


def _make_kernel(plan: AttentionPlan, dtype: Any, interpret: Any) -> Any:
    config = plan.config
    count = plan.batch * config.parts
    heads = (count, plan.num_tokens, plan.kv_heads * plan.group, plan.head_dim)
    out_types = [jax.ShapeDtypeStruct(heads, jnp.float32 if plan.partial else dtype)]
    if plan.partial:
        log_sums = (count, plan.kv_heads, plan.tiles, ROWS)
        out_types.append(jax.ShapeDtypeStruct(log_sums, jnp.float32))

    @fixed_name(interpret)
    def paged_attention_kernel(
        q, k_pages, v_pages, table, context_lens, kv_lens, row_words, *more_and_out, **refs
    ):
        refs = named(plan, refs)
        windows, outputs = more_and_out[: -len(out_types)], more_and_out[-len(out_types) :]
        offset = None
        if plan.float8:
            *windows, refs["k_scale"], refs["v_scale"] = windows
        if plan.whole_size is not None:
            *windows, offset = windows
        work = Work(plan, context_lens, kv_lens, windows[0] if windows else None, offset)
        warpgroup = kernel_axes.index("warpgroup")

        @pl.when(warpgroup == config.consumers)
        def _():
            _produce(plan, work, table, (k_pages, v_pages), refs)

        @pl.when(warpgroup < config.consumers)
        def _():
            _compute(plan, work, q, (row_words, windows), outputs, refs, warpgroup)

    return plgpu.kernel(
        paged_attention_kernel,
        out_type=out_types if plan.partial else out_types[0],
        scratch_types=scratch(plan, dtype),
        grid=(plan.row_blocks, plan.kv_heads // config.heads, count),
        grid_names=kernel_axes.names("row_block", "kv_heads", "sequence"),
        cluster=(config.splits,),
        cluster_names=kernel_axes.names("split"),
        num_threads=config.consumers + 1,
        thread_name=kernel_axes.name("warpgroup"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # sums of rows are in registers; rings need the memory
        ),
        interpret=interpret,
    )


def _produce(
    plan: AttentionPlan, work: Work, table: Any, pages: tuple[Any, Any], refs: Any
) -> None:
    """The producer's part: it copies blocks of keys and values."""
    config, (k_pages, v_pages) = plan.config, pages
    if config.registers:
        plgpu.set_max_registers(config.producer_registers, action="decrease")
    produce = produce_wide_blocks if plan.float8 else produce_blocks
    produce(plan, work, table, (k_pages, refs["k"]), (v_pages, refs["v"]), refs)
    if config.splits > 1:  # all threads must take part in both barriers of the merge
        cluster.sync()
        cluster.sync()


def _compute(
    plan: AttentionPlan,
    work: Work,
    q: Any,
    masks: tuple[Any, Sequence[Any]],
    outputs: Sequence[Any],
    refs: Any,
    warpgroup: Array,
) -> None:
    """A compute warpgroup's part: one tile of query rows. ``masks``: see _row_masks."""
    config, (row_words, windows) = plan.config, masks
    if config.registers:
        plgpu.set_max_registers(config.registers, action="increase")
    tile = kernel_axes.index("row_block") * config.warpgroups
    tile += lax.rem(warpgroup, config.warpgroups)
    load_queries(plan, work, q, tile, refs)
    words = load_words(plan, work, row_words, tile)
    seen_from = None
    if plan.window is not None:
        seen_from = row_load(windows[1].at[work.sequence, tile])
    state = attend(plan, work, words, seen_from, refs)
    if config.splits > 1:
        merge_and_store(plan, work, state, tile, outputs, refs)
    else:
        store(plan, work, state, tile, outputs, refs)
