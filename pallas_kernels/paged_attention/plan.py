"""Sizes of a call of the paged attention kernel, and the part of it that a CTA does."""

import dataclasses
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels import kernel_axes
from pallas_kernels.float8 import is_float8
from pallas_kernels.paged_attention.tuning import (
    ROWS,
    AttentionTuning,
    attention_tuning,
    float8_tuning,
    large_head_float8_tuning,
    large_head_tuning,
    of_parts,
)
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext

LARGE = 256  # width of large heads
MERGED = 128  # most columns of the parts of merged rows
# By whether heads are large, and pages 8-bit.
TUNINGS = MappingProxyType(
    {
        (False, False): attention_tuning,
        (False, True): float8_tuning,
        (True, False): large_head_tuning,
        (True, True): large_head_float8_tuning,
    }
)


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
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
    softcap: float | None  # of the scaled scores
    float8: bool  # pages of bytes, with scales
    config: AttentionTuning
    interpret: bool

    @property
    def partial(self) -> bool:
        """Whether outputs are parts of attention, in float32, beside log-sum-exps."""
        return self.whole_size is not None or self.config.parts > 1

    @property
    def large(self) -> bool:
        """Whether rows are so large that memory is short: see memory.py."""
        return self.head_dim == LARGE

    @property
    def merged_columns(self) -> int:
        """Columns of a part of the rows that CTAs merge."""
        return min(self.head_dim, MERGED)

    @property
    def stored_columns(self) -> int:
        """Columns of rows that leave at a time: not all, where rows are large and float32."""
        large_f32 = self.large and self.partial and self.config.splits == 1
        return MERGED if large_f32 else self.head_dim

    @property
    def log_sum_columns(self) -> int:
        """Columns that CTAs merge at a time: so often a row's log-sum-exp is in memory."""
        return 32 if self.large else self.head_dim

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
        """Blocks whose values are cleaned by themselves: the last of a context, and maybe the
        first, may hold slots that no query sees. Those of bytes are cleaned when they are widened.
        """
        if self.float8:
            return 0
        return 2 if self.has_left_edge else 1


def make_plan(
    q: Array,
    pages: LayerPages,
    context: QueryContext,
    options: AttentionOptions,
    whole_size: int | None,
    config: AttentionTuning | None,
    interpret: Any,
) -> AttentionPlan:
    """The sizes of a call. ``whole_size``: see AttentionPlan; ``config`` None: from tuning.py."""
    k_pages, page_table, ancestors = pages.k, context.page_table, context.ancestors
    batch, num_tokens, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    group = num_heads // kv_heads
    row_tiles = -(-num_tokens // (ROWS // group))
    if config is None:
        slots = page_table.shape[1] * page_size
        if options.window is not None:  # no query sees more
            slots = min(slots, options.window + num_tokens)
        tuning = TUNINGS[head_dim == LARGE, is_float8(k_pages)]
        config = tuning(batch, kv_heads, row_tiles, slots, page_size)
        if head_dim == LARGE and whole_size is not None:
            config = of_parts(config)
    tiles = -(-row_tiles // config.warpgroups) * config.warpgroups
    return AttentionPlan(
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
        window=options.window,
        first_slot=options.first_slot,
        scale=head_dim**-0.5 if options.scale is None else options.scale,
        softcap=options.softcap,
        float8=is_float8(k_pages),
        config=config,
        interpret=interpret is not None,
    )


class Work:
    """The range of context blocks that this CTA attends to: [start, stop).

    Attributes:
      output: where in the outputs the part of the sequence is.
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
        plan: AttentionPlan,
        context_lens: Any,
        kv_lens: Any,
        window_edges: Any | None,
        offset: Any | None,
    ) -> None:
        self.plan, block = plan, plan.config.block
        self.offset: Any = None if offset is None else offset[0]
        self.sequence = self.output = kernel_axes.index("sequence")
        if plan.config.parts > 1:
            self.sequence = self.output // plan.config.parts
        self.first_head = kernel_axes.index("kv_heads") * plan.config.heads
        self.own_head = kernel_axes.index("warpgroup") // plan.config.warpgroups
        self.kv_head = self.first_head + self.own_head
        self.split = kernel_axes.index("split")
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
            before = kernel_axes.index("row_block") * tokens
            self.committed += before
            end = jnp.minimum(end, self.context + before + tokens)
        self.committed = jnp.minimum(self.committed, self.end)
        self.first, self.all_see_from = self._here(first), self._here(all_see_from)
        self.all_see_to, self.kv_len = self._here(self.committed), self._here(self.end)
        end = self._here(end)
        # If block 0 is known to be visible, this is a constant and the page lookup need not wait.
        first_block = 0 if plan.window is None and plan.first_slot < block else self.first // block
        num_blocks = jnp.maximum((end + block - 1) // block - first_block, 0)
        count, index = plan.config.splits, self.split
        if plan.config.parts > 1:
            count, index = plan.config.parts, self.output % plan.config.parts
        share = (num_blocks + count - 1) // count
        last = first_block + num_blocks
        self.start = jnp.minimum(first_block + index * share, last)
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
