"""Attention to blocks of positions, which index heads choose for each KV head, in jnp.

A sequence's positions are cut into blocks of N from its first on. An index head scores a block for
a query by the largest product of an index query with the keys of the positions that the query sees
in it: of the committed ones, and of the query's ancestors in a tree. A maximum has the same value
in any order, so every node scores the blocks of its own text exactly, and nothing is taken back.

The best blocks are gathered for each query by itself, by positions in its own text, whatever slots
the nodes of a tree have. So sums are those of plain decoding, and the rest costs no more than the
blocks, however long a sequence is.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.float8 import decode
from pallas_kernels.latent_attention.chosen import BLOCK_BYTES, in_blocks
from pallas_kernels.latent_attention.pools import Paths, slots_in_pages
from pallas_kernels.paged_attention.reference import (
    MASKED,
    by_head,
    gather_pages,
    scaled_scores_f64,
    softmax_times_values,
)
from pallas_kernels.pages import LayerPages, QueryContext
from pallas_kernels.products import scores_f32


class BlockOptions(NamedTuple):
    """What shapes a program of this attention: a static argument.

    Attributes:
      size: N, positions of a block.
      top_k: most blocks that a query attends to.
      local: so many of the latest blocks are always among them, the query's own included.
      scale: of the scores of attention; None: 1 / sqrt(D).
      first_slot, order_invariant: as of paged_attention. The first block begins at ``first_slot``.
      block: tokens that are read at a time; None: as fit BLOCK_BYTES.
    """

    size: int
    top_k: int
    local: int = 1
    scale: float | None = None
    first_slot: int = 0
    order_invariant: bool = False
    block: int | None = None

    def count(self, num_slots: int) -> int:
        """The blocks that so many slots may be of."""
        return -(-max(num_slots - self.first_slot, 0) // self.size)


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("options",))
@jax.named_scope("indexer")
def choose_blocks(q: Array, pages: Array, context: QueryContext, *, options: BlockOptions) -> Array:
    """The blocks that T queries of each sequence attend to.

    Args:
      q: [B, T, I, D] queries of the I index heads.
      pages: [P, 1, K, D], index keys; they already hold the queries' own.
      context: what queries see.

    Returns int32 [B, T, I, k]: numbers of blocks in ascending order, then the number of all blocks
    where an index head chooses fewer.
    """
    keys = gather_pages(pages, context.page_table)[:, 0]
    return best_blocks(q, keys, Paths.of(context), options)


def best_blocks(q: Array, keys: Array, paths: Paths, options: BlockOptions) -> Array:
    """choose_blocks of keys [B, S, D], in the order of a sequence's slots."""
    batch, _, num_heads, _ = q.shape
    num_slots, count = keys.shape[1], options.count(keys.shape[1])
    block = options.block
    if block is None:
        block = BLOCK_BYTES // (4 * batch * num_heads * num_slots)
    arrays = [q, paths.last] + ([] if paths.nodes is None else [paths.nodes])

    def chosen(q: Array, last: Array, *nodes: Array) -> Array:
        of_block = Paths(last, paths.context_lens, nodes[0] if nodes else None)
        scores = _block_scores(q, keys, of_block, options)
        latest = (last - options.first_slot) // options.size
        behind = latest[..., None] - jnp.arange(count)  # [B, T, n]
        is_local = (behind >= 0) & (behind < options.local)
        scores = jnp.where(is_local[:, :, None], jnp.inf, scores)
        best, blocks = lax.top_k(scores, min(options.top_k, count))
        return jnp.sort(jnp.where(best > -jnp.inf, blocks, count), axis=-1)

    return in_blocks(chosen, arrays, block)


def _block_scores(q: Array, keys: Array, paths: Paths, options: BlockOptions) -> Array:
    """float32 [B, T, I, n]; minus infinity of blocks in which a query sees no position."""
    num_slots, size, first = keys.shape[1], options.size, options.first_slot
    slots = jnp.arange(num_slots)
    last = paths.last if paths.nodes is None else paths.context_lens[:, None] - 1
    seen = (slots >= first) & (slots <= last[..., None])  # [B, T, S], or [B, 1, S] of a tree
    scores = jnp.where(seen[:, :, None], _products(q, keys, options), -jnp.inf)
    missing = options.count(num_slots) * size - (num_slots - first)
    padding = [(0, 0)] * 3 + [(0, missing)]
    padded = jnp.pad(scores[..., first:], padding, constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*q.shape[:3], -1, size), axis=-1)
    if paths.nodes is not None:
        best = jnp.maximum(best, _scores_of_nodes(q, keys, paths, options))
    return jnp.where(best == 0, 0, best)  # -0 is not less than 0


def _scores_of_nodes(q: Array, keys: Array, paths: Paths, options: BlockOptions) -> Array:
    """The same of each node's ancestors in the tree, itself included: [B, T, I, n]."""
    assert paths.nodes is not None
    num_slots, width = keys.shape[1], paths.nodes.shape[-1]
    beyond = paths.context_lens[:, None]
    slots = jnp.minimum(beyond + jnp.arange(width), num_slots - 1)
    of_nodes = _products(q, jnp.take_along_axis(keys, slots[..., None], axis=1), options)
    # In the order of depths: the positions of a node's own text that follow the context.
    node = jnp.minimum(paths.nodes, width - 1)[:, :, None]
    by_depth = jnp.take_along_axis(of_nodes, node, axis=-1)
    by_depth = jnp.where((paths.nodes < width)[:, :, None], by_depth, -jnp.inf)
    # They are of a few blocks that follow each other.
    start, few = (beyond - options.first_slot) // options.size, (width - 1) // options.size + 2
    block = (beyond + jnp.arange(width) - options.first_slot) // options.size - start  # [B, W]
    is_of = block[:, None] == jnp.arange(few)[:, None]  # [B, few, W]
    each = jnp.where(is_of[:, None, None], by_depth[..., None, :], -jnp.inf)
    place = jnp.arange(options.count(num_slots)) - start  # [B, n]
    inside = (place >= 0) & (place < few)
    index = jnp.broadcast_to(
        jnp.clip(place, 0, few - 1)[:, None, None], (*q.shape[:3], place.shape[-1])
    )
    best = jnp.take_along_axis(jnp.max(each, axis=-1), index, axis=-1)
    return jnp.where(inside[:, None, None], best, -jnp.inf)


def _products(q: Array, keys: Array, options: BlockOptions) -> Array:
    """Index queries [B, T, I, D] times keys [B, S, D]: float32 [B, T, I, S]."""
    rows = q.reshape(len(q), 1, -1, q.shape[-1])
    keys = keys[:, None]
    wide = scaled_scores_f64(rows, keys, 1) if options.order_invariant else scores_f32(rows, keys)
    return wide.reshape(*q.shape[:3], -1)


def positions_of_blocks(blocks: Array, last: Array, options: BlockOptions) -> tuple[Array, Array]:
    """The positions [B, T, G, k * N] of blocks [B, T, G, k], and which of them texts of last
    positions [B, T] have."""
    starts = options.first_slot + options.size * blocks
    positions = (starts[..., None] + jnp.arange(options.size)).reshape(*blocks.shape[:3], -1)
    return positions, positions <= last[..., None, None]


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("options",))
@jax.named_scope("attention")
def attend_to_blocks(
    q: Array, pages: LayerPages, context: QueryContext, blocks: Array, *, options: BlockOptions
) -> Array:
    """Attend from T queries of each sequence to the positions of the blocks that were chosen for
    their KV head.

    Args:
      q: [B, T, Q, D], as of paged_attention.
      pages: of the layer, of G KV heads; they already hold the queries' own keys and values.
      blocks: int32 [B, T, G, k], a result of choose_blocks.

    Returns [B, T, Q, D] in q's dtype. Queries of which no block was chosen return a finite value.
    """
    batch, _, num_heads, width = q.shape
    kv_heads, paths = pages.k.shape[1], Paths.of(context)
    block = options.block
    if block is None:
        of_slot = kv_heads * 2 * width * q.dtype.itemsize + 4 * num_heads
        block = BLOCK_BYTES // (batch * blocks.shape[-1] * options.size * of_slot)
    arrays = [q, paths.last, blocks] + ([] if paths.nodes is None else [paths.nodes])

    def attend(q: Array, last: Array, blocks: Array, *nodes: Array) -> Array:
        of_block = Paths(last, paths.context_lens, nodes[0] if nodes else None)
        positions, seen = positions_of_blocks(blocks, last, options)
        slots = of_block.slots(positions.reshape(*last.shape, -1))
        slots = slots_in_pages(context, slots, pages.k.shape[2]).reshape(positions.shape)
        return _attend_to_slots(q, pages, slots, seen, options)

    return in_blocks(attend, arrays, block)


def _attend_to_slots(
    q: Array, pages: LayerPages, slots: Array, seen: Array, options: BlockOptions
) -> Array:
    """Attend from queries [B, T, Q, D] to the slots in memory [B, T, G, n] of each KV head that are
    ``seen``."""
    kv_heads, page_size, width = pages.k.shape[1:]
    index = slots // page_size, jnp.arange(kv_heads)[:, None], slots % page_size

    def rows_of(pages: Array) -> Array:
        rows = decode(pages.at[index].get(mode="promise_in_bounds"), q.dtype)
        rows = jnp.where(seen[..., None], rows, 0)  # 0 x NaN is NaN
        return rows.reshape(-1, *rows.shape[2:])  # [B * T, G, n, D]

    keys, values = rows_of(pages.k), rows_of(pages.v)
    grouped = q.reshape(len(keys), kv_heads, -1, width)
    scale = width**-0.5 if options.scale is None else options.scale
    if options.order_invariant:
        scores = scaled_scores_f64(grouped, keys, scale)
    else:
        scores = scores_f32(grouped, keys) * scale
    scores = by_head(scores, pages.k_scale)
    visible = seen.reshape(-1, kv_heads, 1, seen.shape[-1])
    scores = jnp.where(visible, scores, MASKED)  # [B * T, G, R, n]
    out = softmax_times_values(scores, values, options.order_invariant)
    return by_head(out, pages.v_scale).reshape(q.shape).astype(q.dtype)
