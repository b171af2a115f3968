"""Attention with grouped KV heads to some positions of each query, which an indexer chooses, in
jnp.

Keys and values of the positions are gathered for each query by itself, so it costs no more than as
many slots, however long a sequence is.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import decode
from pallas_kernels.latent_attention.chosen import BLOCK_BYTES, in_blocks
from pallas_kernels.paged_attention.reference import (
    MASKED,
    by_head,
    scaled_scores_f64,
    softmax_times_values,
)
from pallas_kernels.pages import LayerPages
from pallas_kernels.products import scores_f32


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("scale", "order_invariant", "block"))
@jax.named_scope("attention")
def chosen_heads_attention(
    q: Array,
    pages: LayerPages,
    page_table: Array,
    chosen: Array,
    *,
    scale: float | None = None,
    order_invariant: bool = False,
    block: int | None = None,
) -> Array:
    """Attend from T queries of each sequence to the slots that were chosen for them.

    Args:
      q: [B, T, Q, D] queries of G KV heads' groups.
      pages: [P, G, K, D] each; they already hold the queries' own keys and values.
      page_table: int32 [B, M].
      chosen: int32 [B, T, k], as of latent_attention.chosen.choose_slots.
      scale: of the scores; None: 1 / sqrt(D).
      order_invariant: sums over slots are in float64, see paged_attention.
      block: tokens that are read at a time; None: as fit BLOCK_BYTES.

    Returns [B, T, Q, D] in q's dtype. Queries of which no slot was chosen return a finite value.
    """
    batch, _, num_heads, width = q.shape
    kv_heads, page_size, count = *pages.k.shape[1:3], chosen.shape[-1]
    factor = width**-0.5 if scale is None else scale
    if block is None:
        of_slot = 2 * kv_heads * width * q.dtype.itemsize + 4 * num_heads
        block = BLOCK_BYTES // (batch * count * of_slot)

    def attend(q: Array, chosen: Array) -> Array:
        is_slot = chosen < page_table.shape[1] * page_size  # [B, T, k]
        position = jnp.where(is_slot, chosen, 0)
        columns = (position // page_size).reshape(batch, -1)
        page = jnp.take_along_axis(page_table, columns, axis=1).reshape(chosen.shape)
        seen = is_slot.reshape(-1, 1, 1, count)

        def rows(pages: Array) -> Array:
            """[B * T, G, k, D]; 0 where nothing was chosen: 0 x NaN is NaN."""
            slots = (page * page_size + position % page_size).reshape(-1, 1, count)
            page_of, offset = slots // page_size, slots % page_size
            heads = jnp.arange(kv_heads)[:, None]
            found = pages.at[page_of, heads, offset].get(mode="promise_in_bounds")
            return jnp.where(jnp.swapaxes(seen, 2, 3), decode(found, q.dtype), 0)

        k, v = rows(pages.k), rows(pages.v)
        grouped = q.reshape(len(k), kv_heads, -1, width)  # [B * T, G, Q / G, D]
        if order_invariant:
            scores = scaled_scores_f64(grouped, k, factor)
        else:
            scores = scores_f32(grouped, k) * factor
        scores = jnp.where(seen, by_head(scores, pages.k_scale), MASKED)
        out = by_head(softmax_times_values(scores, v, order_invariant), pages.v_scale)
        return out.reshape(q.shape).astype(q.dtype)

    return in_blocks(attend, (q, chosen), block)
