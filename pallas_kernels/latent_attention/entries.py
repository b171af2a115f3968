"""Attention to a window of tokens and to entries of spans (see spans.py), in jnp.

A vector of a token, or an entry, is key and value at once, of all heads. What a query attends to is
gathered for it by itself: by positions in its own text, whatever slots the nodes of a tree have. So
sums are those of plain decoding.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.latent_attention.chosen import BLOCK_BYTES, in_blocks
from pallas_kernels.latent_attention.pools import (
    Paths,
    Pools,
    WholePools,
    best_pools,
    pool_ends,
    slots_in_pages,
)
from pallas_kernels.paged_attention.reference import (
    MASKED,
    scaled_scores_f64,
    softmax_times_values,
)
from pallas_kernels.pages import QueryContext
from pallas_kernels.products import scores_f32


class IndexQueries(NamedTuple):
    """What chooses entries.

    Attributes:
      q, weights: [B, T, I, D] and float32 [B, T, I], of the indexer's I heads: see best_slots.
      pages: [P, 1, K, W], which have a key of each span in ``columns``.
      top_k: most entries that a token attends to.
    """

    q: Array
    weights: Array
    pages: Array
    columns: tuple[int, int]
    top_k: int


def entry_ends(
    context: QueryContext,
    size: int,
    page_size: int,
    index: IndexQueries | None,
    first_slot: int = 0,
    order_invariant: bool = False,
) -> Array:
    """The positions of the last tokens of the spans that T queries of each sequence attend to:
    int32 [B, T, n] in ascending order, -1 where there are fewer."""
    paths = Paths.of(context)
    num_slots = context.page_table.shape[1] * page_size
    ends = pool_ends(num_slots, size, first_slot)
    if index is None or len(ends) <= index.top_k:
        return jnp.where(ends <= paths.last[..., None], ends, -1)
    q = index.q

    def keys_at(slots: Array) -> Array:
        slots = jnp.broadcast_to(slots, (len(q), slots.shape[-1]))
        return gathered(index.pages, context, slots[:, None], index.columns)[:, 0]

    whole = WholePools(keys_at(ends), ends)
    if paths.nodes is not None:
        nodes = context.context_lens[:, None] + jnp.arange(paths.nodes.shape[-1])
        whole = whole._replace(node_keys=keys_at(nodes))
    pools = Pools(size, index.top_k * size)
    best = best_pools(q, index.weights, whole, paths, pools, order_invariant)
    return jnp.where(best < len(ends), ends[jnp.minimum(best, len(ends) - 1)], -1)


def gathered(pages: Array, context: QueryContext, slots: Array, columns: tuple[int, int]) -> Array:
    """Columns [B, T, n, D] of pages [P, 1, K, W] at a sequence's slots [B, T, n]."""
    where = slots_in_pages(context, slots, pages.shape[2])
    flat = pages.reshape(-1, pages.shape[-1])
    return flat[where, columns[0] : columns[1]]


class EntryOptions(NamedTuple):
    """What shapes a program of this attention: a static argument.

    Attributes:
      window: latest positions that a token attends to.
      scale: of the scores.
      first_slot, order_invariant: as of paged_attention.
      block: tokens that are read at a time; None: as fit BLOCK_BYTES.
    """

    window: int
    scale: float
    first_slot: int = 0
    order_invariant: bool = False
    block: int | None = None


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("columns", "options"))
@jax.named_scope("attention")
def entry_attention(
    q: Array,
    pages: Array,
    context: QueryContext,
    sinks: Array,
    entries: tuple[Array, Array] | None,
    *,
    columns: tuple[int, int],
    options: EntryOptions,
) -> Array:
    """Attend from T queries of each sequence to the latest tokens, and to entries.

    Args:
      q: [B, T, Q, D].
      pages: [P, 1, K, D], vectors of tokens, the queries' own included.
      sinks: float32 [Q], one more score of each head, of a value of zero.
      entries: [P, 1, K, W] and int32 [B, T, n], pages that have entries in ``columns``, and the
        positions of those that are attended to, a result of entry_ends; None: there are none.

    Returns [B, T, Q, D] in q's dtype.
    """
    paths, window = Paths.of(context), options.window
    count = window + (0 if entries is None else entries[1].shape[-1])
    block = options.block
    if block is None:
        of_query = count * (q.shape[-1] * q.dtype.itemsize + 4 * q.shape[2])
        block = BLOCK_BYTES // (len(q) * of_query)

    def attend(parts: tuple[Array, ...]) -> Array:
        q, last, *nodes = parts[: 2 if paths.nodes is None else 3]
        of_block = Paths(last, paths.context_lens, nodes[0] if nodes else None)
        near = last[..., None] + jnp.arange(1 - window, 1)
        seen = near >= options.first_slot
        rows = gathered(pages, context, of_block.slots(near), (0, q.shape[-1]))
        if entries is not None:
            ends = parts[-1]
            far = gathered(entries[0], context, of_block.slots(jnp.maximum(ends, 0)), columns)
            rows = jnp.concatenate([far, rows], axis=-2)
            seen = jnp.concatenate([ends >= 0, seen], axis=-1)
        return attend_to_rows(q, rows, seen, sinks, options)

    arrays = [q, paths.last]
    arrays += [] if paths.nodes is None else [paths.nodes]
    arrays += [] if entries is None else [entries[1]]
    return in_blocks(lambda *parts: attend(parts), arrays, block)


def attend_to_rows(
    q: Array, rows: Array, seen: Array, sinks: Array, options: EntryOptions
) -> Array:
    """Attend from queries q [B, T, Q, D] to the rows [B, T, S, D] of each that are ``seen``, bool
    [B, T, S], and to sinks [Q]."""
    rows = jnp.where(seen[..., None], rows, 0)  # 0 x NaN is NaN
    if options.order_invariant:
        scores = scaled_scores_f64(q, rows, options.scale)
    else:
        scores = scores_f32(q, rows) * options.scale
    scores = jnp.where(seen[:, :, None], scores, MASKED)  # [B, T, Q, S]
    sunk = sinks.astype(jnp.float32)[None, :, None]
    return softmax_times_values(scores, rows, options.order_invariant, sunk).astype(q.dtype)


def dense_entry_attention(
    q: Array,
    vectors: Array,
    entries: tuple[Array, Array] | None,
    sinks: Array,
    options: EntryOptions,
) -> Array:
    """``entry_attention`` over whole sequences: vectors [B, T, D] of tokens, entries [B, n, D], and
    which of them each token attends to: bool [B, T, n]."""
    batch, size = q.shape[:2]
    token = jnp.arange(size)
    behind = token[:, None] - token
    seen = (behind >= 0) & (behind < options.window)
    seen = jnp.broadcast_to(seen, (batch, size, size))
    rows = vectors
    if entries is not None:
        rows = jnp.concatenate([entries[0], rows], axis=1)
        seen = jnp.concatenate([entries[1], seen], axis=-1)
    scores = jnp.einsum("btqd,bsd->btqs", q, rows, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, :, None], scores * options.scale, MASKED)
    sunk = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sunk], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("btqs,bsd->btqd", weights.astype(rows.dtype), rows)
