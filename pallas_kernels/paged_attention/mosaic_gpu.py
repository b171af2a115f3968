"""Paged attention on Hopper GPUs: flash attention over pages, split over the context.

Each compute warpgroup of a thread block (CTA) handles 64 query rows: all query heads of one KV head
for a few tokens, so that a page is read once for all of them. A producer warpgroup looks up page
indices and copies keys and values by TMA into a ring of blocks in shared memory. If there are fewer
pairs of a sequence and a KV head than multiprocessors, a cluster of CTAs shares one context: each
attends to a range of it, and they merge their softmaxes through distributed shared memory.

Rows of values that no query sees may hold NaN. A weight of 0 would not remove it (0 x NaN is NaN).
Such rows lie only in the first and the last block of a context. There the producer overwrites them
with zeros while the compute warpgroups are busy with scores. (Keys that no query sees need no such
care: the mask replaces their scores.)

Where sequences are spread over devices, pages hold a part of each page's slots, in the order of the
sequence. So those before any slot are a prefix of those that are here: blocks are made of the
slots that are here, and only the mask has to know where in the sequence they lie. Beside the part's
output, in float32, the kernel then returns the log-sum-exp of each query's scores.
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
import numpy as np
from jax import Array, lax

from pallas_kernels import cluster
from pallas_kernels.float8 import BYTES, is_float8
from pallas_kernels.paged_attention.blocks import (
    block_pages,
    copy_block,
    produce_wide_blocks,
    wait_until_all_free,
    wait_until_free,
)
from pallas_kernels.paged_attention.partial import PartialAttention
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
from pallas_kernels.paged_attention.tuning import (
    ROWS,
    AttentionTuning,
    attention_tuning,
    float8_tuning,
)
from pallas_kernels.shared_memory import SWIZZLED, swizzled_bytes, zero_rows_outside

MERGED_ROWS = 32  # rows of all splits merged at a time; more would need more registers
LN_2 = math.log(2)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of a call. A tile is the rows of one warpgroup: ``tokens`` tokens of one KV head.

    The *edges* of a context are the blocks that hold its first visible slot and its end.
    """

    batch: int
    num_tokens: int
    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    page_size: int
    whole_size: int | None  # slots of a whole page, if pages hold a part of each; else None
    columns: int  # of the page table
    words: int  # of the ancestor mask
    causal: bool  # no mask: a token sees the tokens before it
    tiles: int  # tiles that share the tokens of a sequence
    tokens: int  # of a tile
    window: int | None
    first_slot: int
    scale: float  # of the scores
    float8: bool  # pages of bytes, with scales
    config: AttentionTuning
    interpret: bool

    @property
    def partial(self) -> bool:
        """Whether pages hold a part of each page, and log-sum-exps are returned, too."""
        return self.whole_size is not None

    @property
    def row_blocks(self) -> int:
        return self.tiles // self.config.warpgroups

    @property
    def pages_of_block(self) -> int:
        """Pages that a block of context slots lies in."""
        return max(self.config.block // self.page_size, 1)

    @property
    def has_left_edge(self) -> bool:
        return self.window is not None or self.first_slot > 0

    @property
    def num_edges(self) -> int:
        """Blocks whose values are cleaned apart: the last of a context, and maybe the first, may
        hold slots that no query sees. Those of bytes are cleaned when they are widened."""
        if self.float8:
            return 0
        return 2 if self.has_left_edge else 1


# Traced once for all layers of a model: building and compiling the kernel takes seconds.
@functools.partial(
    jax.jit, static_argnames=("window", "first_slot", "scale", "config", "interpret")
)
def paged_attention_mosaic(
    q: Array,  # [B, T, Q, D]
    k_pages: Array,  # [P, G, K, D]
    v_pages: Array,
    page_table: Array,  # [B, M]
    context_lens: Array,  # [B]
    positions: Array,  # [B, T]
    ancestors: Array | None,  # [B, T, words]
    kv_lens: Array,  # [B]
    k_scale: Array | None = None,  # [G]
    v_scale: Array | None = None,
    *,
    window: int | None,
    first_slot: int,
    scale: float | None = None,
    config: AttentionTuning | None = None,
    interpret: Any = None,
) -> Array:
    """See pallas_kernels.paged_attention.paged_attention; only for what ``misfit`` accepts.

    ``config`` None: from tuning.py. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    plan = _make_plan(
        q, k_pages, page_table, ancestors, None, window, first_slot, scale, config, interpret
    )
    kernel = _make_kernel(plan, q.dtype, interpret)
    masks = _row_masks(plan, positions, ancestors)
    scales = [] if k_scale is None else [k_scale, v_scale]
    return kernel(q, k_pages, v_pages, page_table, context_lens, kv_lens, *masks, *scales)


@functools.partial(
    jax.jit, static_argnames=("page_size", "window", "first_slot", "scale", "config", "interpret")
)
def partial_attention_mosaic(
    q: Array,  # [B, T, Q, D]
    k_pages: Array,  # [P, G, K, D]
    v_pages: Array,
    page_table: Array,  # [B, M]
    context_lens: Array,  # [B]
    positions: Array,  # [B, T]
    ancestors: Array | None,  # [B, T, words]
    kv_lens: Array,  # [B]
    offset: Array,  # []
    k_scale: Array | None = None,  # [G]
    v_scale: Array | None = None,
    *,
    page_size: int,
    window: int | None,
    first_slot: int,
    scale: float | None = None,
    config: AttentionTuning | None = None,
    interpret: Any = None,
) -> PartialAttention:
    """See pallas_kernels.paged_attention.partial; only for what ``misfit`` accepts.

    The output is normalized: ``peak`` is the log-sum-exp, and ``total`` is 1.
    """
    plan = _make_plan(
        q, k_pages, page_table, ancestors, page_size, window, first_slot, scale, config, interpret
    )
    kernel = _make_kernel(plan, q.dtype, interpret)
    masks = _row_masks(plan, positions, ancestors)
    lengths = context_lens, kv_lens
    more = [offset[None]] if k_scale is None else [offset[None], k_scale, v_scale]
    out, log_sums = kernel(q, k_pages, v_pages, page_table, *lengths, *masks, *more)
    log_sums = _by_token(plan, log_sums)
    return PartialAttention(out, log_sums, jnp.ones_like(log_sums))


def _make_plan(
    q: Array,
    k_pages: Array,
    page_table: Array,
    ancestors: Array | None,
    whole_size: int | None,
    window: int | None,
    first_slot: int,
    scale: float | None,
    config: AttentionTuning | None,
    interpret: Any,
) -> _Plan:
    batch, num_tokens, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    group = num_heads // kv_heads
    row_tiles = -(-num_tokens // (ROWS // group))
    if config is None:
        slots = page_table.shape[1] * page_size
        tuning = float8_tuning if is_float8(k_pages) else attention_tuning
        config = tuning(batch, kv_heads, row_tiles, slots, page_size)
    tiles = -(-row_tiles // config.warpgroups) * config.warpgroups
    return _Plan(
        batch=batch,
        num_tokens=num_tokens,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        whole_size=whole_size,
        columns=page_table.shape[1],
        words=1 if ancestors is None else ancestors.shape[-1],
        causal=ancestors is None,
        tiles=tiles,
        tokens=-(-num_tokens // tiles),
        window=window,
        first_slot=first_slot,
        scale=head_dim**-0.5 if scale is None else scale,
        float8=is_float8(k_pages),
        config=config,
        interpret=interpret is not None,
    )


def _row_masks(plan: _Plan, positions: Array, ancestors: Array | None) -> list[Array]:
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


def _by_token(plan: _Plan, rows: Array) -> Array:
    """A value per row of each tile [B, G, tiles, ROWS] as one per query [B, T, Q]."""
    used = rows[..., : plan.tokens * plan.group]
    by_token = used.reshape(plan.batch, plan.kv_heads, -1, plan.group)[:, :, : plan.num_tokens]
    return by_token.swapaxes(1, 2).reshape(plan.batch, plan.num_tokens, -1)


def _make_kernel(plan: _Plan, dtype: Any, interpret: Any) -> Any:
    config = plan.config
    tile = (config.consumers, ROWS, plan.head_dim)
    ring = (config.stages, config.heads, config.block, plan.head_dim)
    copies = config.heads * plan.pages_of_block  # TMA copies that fill a stage
    filled = 1 if plan.float8 else copies  # arrivals: of those copies, or of who widens

    # The merge comes after the last keys and values and reuses their memory. Rows are padded:
    # otherwise the eight rows that a warp writes at once would start in the same bank.
    padded = (*tile[:2], plan.head_dim + 8)
    shared_f32 = plgpu.SMEM(padded, jnp.float32) if config.splits > 1 else None

    # Rows of a part are stored in float32, where queries were.
    rows_f32 = plgpu.SMEM(tile, jnp.float32) if plan.partial else None

    heads = (plan.batch, plan.num_tokens, plan.kv_heads * plan.group, plan.head_dim)
    out_types = [jax.ShapeDtypeStruct(heads, jnp.float32 if plan.partial else dtype)]
    if plan.partial:
        log_sums = (plan.batch, plan.kv_heads, plan.tiles, ROWS)
        out_types.append(jax.ShapeDtypeStruct(log_sums, jnp.float32))

    def swizzled(shape: tuple[int, ...]) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)

    def in_bytes() -> list[Any]:
        if not plan.float8:
            return []
        shape = (config.byte_stages, *ring[1:])
        return [plgpu.SMEM(shape, BYTES, transforms=swizzled_bytes(plan.head_dim))]

    def and_then(first: list[Any], second: Any | None) -> Any:
        """Memory for ``first`` and later for ``second``; None: for ``first`` only, nested alike."""
        if second is None:
            return [first]
        # The interpreter knows no unions.
        return [first, [second]] if plan.interpret else plgpu.RefUnion(first, [second])

    def scratch() -> dict[str, Any]:
        cleaned = {}
        if plan.num_edges:
            cleaned = {"v_cleaned": plgpu.Barrier(num_barriers=plan.num_edges)}
        refs = {
            "queries_or_out": and_then([swizzled(tile), plgpu.SMEM(tile, dtype)], rows_f32),
            "k_or_out": and_then([swizzled(ring), *in_bytes()], shared_f32),
            "v_or_log_sums": and_then([swizzled(ring), *in_bytes()], shared_f32),
            "q_full": plgpu.Barrier(num_arrivals=plan.tokens, num_barriers=config.consumers),
            "k_full": plgpu.Barrier(num_arrivals=filled, num_barriers=config.stages),
            # Values of edge blocks have separate barriers, because the producer waits for them too.
            "v_full": plgpu.Barrier(
                num_arrivals=filled, num_barriers=config.stages + plan.num_edges
            ),
            **cleaned,
            "k_free": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
            "v_free": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
        }
        if plan.float8:
            for name in ("k_arrived", "v_arrived"):
                refs[name] = plgpu.Barrier(num_arrivals=copies, num_barriers=config.byte_stages)
        if config.splits > 1 or plan.partial:
            refs["all_read"] = plgpu.Barrier(num_arrivals=config.consumers)
        if plan.partial:
            refs["row_log_sums"] = plgpu.SMEM((config.consumers, ROWS), jnp.float32)
        if config.ping_pong:
            refs["tensor_cores"] = plgpu.Barrier(num_barriers=config.consumers)
        return refs

    def paged_attention_kernel(
        q, k_pages, v_pages, table, context_lens, kv_lens, row_words, *more_and_out, **refs
    ):
        (refs["queries"], refs["rows"]), *out_rows = refs["queries_or_out"]
        ((refs["out_rows"],),) = out_rows or [[refs["rows"]]]
        (refs["k"], *k_bytes), *split_out = refs["k_or_out"]
        (refs["v"], *v_bytes), *log_sums = refs["v_or_log_sums"]
        if plan.float8:
            [refs["k_bytes"]], [refs["v_bytes"]] = k_bytes, v_bytes
        if config.splits > 1:
            ((refs["split_out"],),), ((refs["log_sums"],),) = split_out, log_sums
        windows, outputs = more_and_out[: -len(out_types)], more_and_out[-len(out_types) :]
        offset = None
        if plan.float8:
            *windows, refs["k_scale"], refs["v_scale"] = windows
        if plan.partial:
            *windows, offset = windows
        work = _Work(plan, context_lens, kv_lens, windows[0] if windows else None, offset)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == config.consumers)
        def _produce():
            if config.registers:
                plgpu.set_max_registers(config.producer_registers, action="decrease")
            produce = produce_wide_blocks if plan.float8 else _produce_blocks
            produce(plan, work, table, (k_pages, refs["k"]), (v_pages, refs["v"]), refs)
            if config.splits > 1:  # all threads must take part in both barriers of the merge
                cluster.sync()
                cluster.sync()

        @pl.when(warpgroup < config.consumers)
        def _compute():
            if config.registers:
                plgpu.set_max_registers(config.registers, action="increase")
            tile = lax.axis_index("row_block") * config.warpgroups
            tile += lax.rem(warpgroup, config.warpgroups)
            _load_queries(plan, work, q, tile, refs)
            words = load_words(plan, work, row_words, tile)
            seen_from = None
            if plan.window is not None:
                seen_from = row_load(windows[1].at[work.sequence, tile])
            state = _attend(plan, work, words, seen_from, refs)
            if config.splits > 1:
                _merge_and_store(plan, work, state, tile, outputs, refs)
            else:
                _store(plan, work, state, tile, outputs, refs)

    return plgpu.kernel(
        paged_attention_kernel,
        out_type=out_types if plan.partial else out_types[0],
        scratch_types=scratch(),
        grid=(plan.row_blocks, plan.kv_heads // config.heads, plan.batch),
        grid_names=("row_block", "kv_heads", "sequence"),
        cluster=(config.splits,),
        cluster_names=("split",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )


class _Work:
    """The range of context blocks that this CTA attends to: [start, stop).

    Attributes:
      first_head: first KV head of the CTA.
      own_head: the KV head of this compute warpgroup, counted from ``first_head``.
      kv_head: the same, counted from 0.
      context: number of committed slots.
      end: end of the sequence's slots.
      committed: every row sees the slots before it, but for windows and the first slot. Like the
        two above it counts all slots of the sequence; the next four, and blocks, those that are
        here.
      first, kv_len: no row sees slots before ``first`` or from ``kv_len`` on.
      all_see_from, all_see_to: every row sees the slots of this range.
    """

    def __init__(
        self,
        plan: _Plan,
        context_lens: Any,
        kv_lens: Any,
        window_edges: Any | None,
        offset: Any | None,
    ) -> None:
        self.plan, block = plan, plan.config.block
        self.offset: Any = None if offset is None else offset[0]
        self.sequence = lax.axis_index("sequence")
        self.first_head = lax.axis_index("kv_heads") * plan.config.heads
        self.own_head = lax.axis_index("warpgroup") // plan.config.warpgroups
        self.kv_head = self.first_head + self.own_head
        self.split = lax.axis_index("split")
        self.context = self.committed = context_lens[self.sequence]
        num_slots = plan.columns * (plan.whole_size or plan.page_size)
        self.end = end = jnp.minimum(kv_lens[self.sequence], num_slots)
        first = all_see_from = jnp.int32(plan.first_slot)
        if window_edges is not None:
            edges = (window_edges[self.sequence, i] for i in range(2))
            first, all_see_from = (jnp.maximum(edge, plan.first_slot) for edge in edges)
            # The window does not hide tree nodes.
            first = jnp.maximum(jnp.minimum(first, self.context), plan.first_slot)
        if plan.causal:
            tokens = plan.config.warpgroups * plan.tokens
            before = lax.axis_index("row_block") * tokens
            self.committed += before
            end = jnp.minimum(end, self.context + before + tokens)
        self.committed = jnp.minimum(self.committed, self.end)
        self.first, self.all_see_from = self._here(first), self._here(all_see_from)
        self.all_see_to, self.kv_len = self._here(self.committed), self._here(self.end)
        end = self._here(end)
        # If block 0 is known to be visible, this is a constant and the page lookup need not wait.
        first_block = 0 if plan.window is None and plan.first_slot < block else self.first // block
        num_blocks = jnp.maximum((end + block - 1) // block - first_block, 0)
        share = (num_blocks + plan.config.splits - 1) // plan.config.splits
        last = first_block + num_blocks
        self.start = jnp.minimum(first_block + self.split * share, last)
        self.stop = jnp.minimum(self.start + share, last)

    def _here(self, slot: Array) -> Array:
        """How many of the sequence's slots before ``slot`` are here."""
        whole, part = self.plan.whole_size, self.plan.page_size
        if whole is None:
            return slot
        return slot // whole * part + jnp.clip(slot % whole - self.offset, 0, part)

    def in_sequence(self, slot: Array) -> Array:
        """Where in the sequence the slots lie that are here: of each, its index there."""
        whole, part = self.plan.whole_size, self.plan.page_size
        if whole is None:
            return slot
        page = slot >> (part.bit_length() - 1)  # part is a power of 2
        return slot + page * (whole - part) + self.offset

    def is_left_edge(self, block: Array) -> Array:
        """Whether a block starts before the first visible slot, and holds none from ``kv_len``."""
        size = self.plan.config.block
        return (block * size < self.first) & ((block + 1) * size <= self.kv_len)

    def is_right_edge(self, block: Array) -> Array:
        """Whether a block holds slots from ``kv_len`` on: only the last of a context can."""
        return (block + 1) * self.plan.config.block > self.kv_len

    def values_barrier(self, block: Array, slot: Array) -> Array:
        """Barrier of a block's values: ``slot``, its place in the ring, or one of the edges'.

        Those are ``stages`` for the right edge and ``stages + 1`` for the left one.
        """
        stages = self.plan.config.stages
        if self.plan.has_left_edge:
            slot = jnp.where(self.is_left_edge(block), stages + 1, slot)
        return jnp.where(self.is_right_edge(block), stages, slot)


def _produce_blocks(plan: _Plan, work: _Work, table: Any, k: Any, v: Any, refs: Any) -> None:
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


def _clean_values(plan: _Plan, work: _Work, block: Array, edge: Array, refs: Any) -> None:
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


def _load_queries(plan: _Plan, work: _Work, q: Any, tile: Array, refs: Any) -> None:
    """Load the tile's rows [ROWS, D] to shared memory. Rows past its tokens are undefined.

    TMA copies a few rows per token, without a swizzle. They are then stored again in the tiled
    layout that wgmma reads. Operands in registers would occupy them during the whole kernel.
    """
    warpgroup = lax.axis_index("warpgroup")
    full, rows = refs["q_full"].at[warpgroup], refs["rows"].at[warpgroup]

    @pl.loop(0, plan.tokens)
    def _copy(i):
        token = jnp.minimum(tile * plan.tokens + i, plan.num_tokens - 1)
        plgpu.copy_gmem_to_smem(
            q.at[work.sequence, token, pl.ds(work.kv_head * plan.group, plan.group)],
            rows.at[pl.ds(i * plan.group, plan.group)],
            full,
        )

    plgpu.barrier_wait(full)
    tiled = refs["queries"].at[warpgroup]
    tiled[...] = plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()


def _attend(
    plan: _Plan, work: _Work, words: list[Array], seen_from: Array | None, refs: Any
) -> tuple[Array, Array, Array]:
    """Online softmax over the CTA's blocks: (unnormalized output [ROWS, D], peak, sum [ROWS]).

    Two warpgroups on the same blocks tend to do the same work at the same time: both wait for the
    tensor cores, then both compute exponentials. With ping-pong scheduling (FlashAttention-3, arXiv
    2407.08608) they alternate: a warpgroup holds the tensor cores for the values of one block and
    the keys of the next, while the other computes exponentials.
    """
    config, warpgroup = plan.config, lax.axis_index("warpgroup")
    q = refs["queries"].at[warpgroup]
    scale: Any = plan.scale * math.log2(math.e)  # exponentials are powers of 2
    if plan.float8:
        scale = refs["k_scale"][work.kv_head] * scale

    def scores_of(block: Array, slot: Array, *, masked: bool) -> Array:
        """[ROWS, block] raw scores of a block."""
        if not masked:
            keys = refs["k"].at[slot, work.own_head].transpose((1, 0))
            return product(q, keys, interpret=plan.interpret)
        # The mask needs registers beside the scores, so only half of the slots are done at a time.
        width, halves = config.block // 2, []
        for first in (0, width):
            keys = refs["k"].at[slot, work.own_head, pl.ds(first, width)].transpose((1, 0))
            slots = work.in_sequence(slots_from(block * config.block + first, width))
            seen = visible(plan, work, slots, words, seen_from)
            half = product(q, keys, interpret=plan.interpret)
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
        exps, decay, peak, total = softmax_step(scores, scale, peak, total)
        acc = acc * by_row(decay, plan.head_dim)
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


def _store(
    plan: _Plan, work: _Work, state: Any, tile: Array, outputs: Sequence[Any], refs: Any
) -> None:
    acc, peak, total = state
    if plan.partial:
        _wait_for_others(plan, refs)
    rows = refs["out_rows"].at[lax.axis_index("warpgroup")]
    total = jnp.maximum(total, TINY)
    write(rows, (acc / by_row(total, plan.head_dim)).astype(rows.dtype))
    if plan.partial:
        write(refs["row_log_sums"].at[lax.axis_index("warpgroup")], LN_2 * (peak + jnp.log2(total)))
    plgpu.commit_smem()
    if plan.partial:
        _store_log_sums(work, tile, outputs[1], refs)
    _store_tokens(plan, work, rows, tile, 0, plan.tokens, outputs[0])


def _wait_for_others(plan: _Plan, refs: Any) -> None:
    """Until no other warpgroup reads queries, keys or values: outputs take their place."""
    if plan.config.consumers > 1:
        plgpu.barrier_arrive(refs["all_read"])
        plgpu.barrier_wait(refs["all_read"])


def _store_log_sums(work: _Work, tile: Array, log_sums: Any, refs: Any) -> None:
    """The tile's log-sum-exps from shared memory to the output; _store_tokens waits for it."""
    own = refs["row_log_sums"].at[lax.axis_index("warpgroup")]
    plgpu.copy_smem_to_gmem(own, log_sums.at[work.sequence, work.kv_head, tile])


def _store_tokens(
    plan: _Plan, work: _Work, rows: Any, tile: Array, first: Any, count: Any, out: Any
) -> None:
    """Rows of the tile's tokens [first, first + count) from shared memory to the output."""

    @pl.loop(0, count)
    def _copy(i):
        token = tile * plan.tokens + first + i

        @pl.when(token < plan.num_tokens)
        def _():
            plgpu.copy_smem_to_gmem(
                rows.at[pl.ds((first + i) * plan.group, plan.group)],
                out.at[work.sequence, token, pl.ds(work.kv_head * plan.group, plan.group)],
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the kernel's end waits for the rest


def _merge_and_store(
    plan: _Plan, work: _Work, state: Any, tile: Array, outputs: Sequence[Any], refs: Any
) -> None:
    """Merge the cluster's softmaxes. Each CTA merges and stores its share of the tile's tokens.

    Every CTA first writes its normalized output and its log-sum-exp to shared memory. The
    log-sum-exp is repeated for each entry of a row, so that both are read in the same layout, and
    one cluster barrier is enough. Those that are returned are merged by the first CTA.
    """
    acc, peak, total = state
    splits, warpgroup = plan.config.splits, lax.axis_index("warpgroup")
    entries = pl.ds(0, plan.head_dim)
    rows, split_out = refs["out_rows"].at[warpgroup], refs["split_out"].at[warpgroup, :, entries]
    log_sums = refs["log_sums"].at[warpgroup, :, entries]
    _wait_for_others(plan, refs)
    total = jnp.maximum(total, TINY)
    write(split_out, acc / by_row(total, plan.head_dim))
    log_sum = peak + jnp.log2(total)
    write(log_sums, by_row(log_sum, plan.head_dim))
    if plan.partial:
        write(refs["row_log_sums"].at[warpgroup], log_sum)
    cluster.sync()
    share = -(-plan.tokens // splits)
    first = work.split * share
    count = jnp.clip(plan.tokens - first, 0, share)
    # The last shares overlap where they would otherwise exceed the tile.
    begin = jnp.minimum(first, plan.tokens - share)

    @pl.when(count > 0)
    def _merge():
        # All 128 threads take the same number of entries. With heads of 64, a multiple of two rows.
        num_rows = -(-share * plan.group * plan.head_dim // 128) * 128 // plan.head_dim
        most = MERGED_ROWS // splits  # rows at a time
        for start in range(0, num_rows, most):
            size = min(most, num_rows - start)
            span = pl.ds(begin * plan.group + start, size)
            write(rows.at[span], _merged(plan, split_out, log_sums, span).astype(rows.dtype))

    if plan.partial:

        @pl.when(work.split == 0)
        def _merge_log_sums():
            own = refs["row_log_sums"].at[warpgroup]
            write(own, LN_2 * _merged_log_sums(plan, own))  # which no other CTA reads

    plgpu.commit_smem()  # makes the rows visible to TMA
    cluster.arrive()

    @pl.when(count > 0)
    def _store_share():
        if plan.partial:
            pl.when(work.split == 0)(lambda: _store_log_sums(work, tile, outputs[1], refs))
        _store_tokens(plan, work, rows, tile, begin, share, outputs[0])

    cluster.wait()  # no CTA may exit before all have read its shared memory


def _merged_log_sums(plan: _Plan, own: Any) -> Array:
    """The log-sum-exps of all CTAs together, in powers of 2: [ROWS]."""
    parts = [
        row_load(plgpu.cluster_ref(own, {"split": jnp.int32(i)})) for i in range(plan.config.splits)
    ]
    best = functools.reduce(jnp.maximum, parts)
    return best + jnp.log2(functools.reduce(jnp.add, [jnp.exp2(one - best) for one in parts]))


def _merged(plan: _Plan, split_out: Any, log_sums: Any, span: Any) -> Array:
    """Rows ``span`` of all CTAs' outputs, weighted by their softmax sums: float32 [rows, D]."""

    layout = plgpu.Layout.WG_STRIDED((span.size, plan.head_dim), vec_size=1)

    def peers(ref: Any) -> list[Array]:
        return [
            plgpu.load(plgpu.cluster_ref(ref, {"split": jnp.int32(i)}).at[span], layout=layout)
            for i in range(plan.config.splits)
        ]

    all_sums, outputs = peers(log_sums), peers(split_out)
    best = functools.reduce(jnp.maximum, all_sums)
    weights = [jnp.exp2(one - best) for one in all_sums]
    weighted = [one * weight for one, weight in zip(outputs, weights, strict=True)]
    return functools.reduce(jnp.add, weighted) / functools.reduce(jnp.add, weights)
