"""Attention of a prompt's tokens over pages of latents, with the keys and values of every head.

Keys and values of a head are projections of a token's latent. Here they are computed, a block of
slots at a time, and attention runs head by head. latent_attention over the same pages takes queries
that were projected to the latent's space instead: that is cheaper where few tokens are read.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.parts import PartialAttention, in_blocks
from pallas_kernels.paged_attention.reference import MASKED, gather_pages, visible_slots
from pallas_kernels.pages import AttentionOptions, QueryContext
from pallas_kernels.products import einsum_f32, scores_f32, weighted_sum_f32

BLOCK_BYTES = 1 << 28  # limit for a block's keys, values and scores


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("scale", "first_slot", "block"))
@jax.named_scope("attention")
def expanded_attention(
    q: Array,
    pages: Array,
    key_up: Array,
    value_up: Array,
    context: QueryContext,
    *,
    scale: float,
    first_slot: int = 0,
    block: int | None = None,
) -> Array:
    """Attend from T consecutive tokens per sequence to its committed context and to each other.

    Slots are read up to the last that any query may see. Slots that no query sees may hold NaN.
    There is no gradient where slots are more than a block.

    Args:
      q: [B, T, Q, D + R] queries, of each head the R rotated entries last.
      pages: [P, 1, K, L + R] latents and rotated keys, which already hold the tokens' own.
      key_up, value_up: [Q, D, L] and [Q, Dv, L], from latents to keys and values.
      context: without ancestors.
      first_slot: slots before it are hidden.
      scale: of the scores.
      block: slots of a block, rounded down to pages, at least one; None: as fit BLOCK_BYTES.

    Returns [B, T, Q, Dv] in q's dtype. Queries that see no slot return a finite value.
    """
    (batch, columns), page_size = context.page_table.shape, pages.shape[2]
    options = AttentionOptions(first_slot=first_slot)
    if block is None:
        block = BLOCK_BYTES // _slot_bytes(q, value_up)
    width = min(max(1, block // page_size), columns)  # columns of a block
    table = jnp.pad(context.page_table, ((0, 0), (0, -columns % width)))
    kv_lens = jnp.minimum(context.ends, columns * page_size)
    context = context._replace(kv_lens=kv_lens)
    queries = q.swapaxes(1, 2)

    def attend(index: Array | int) -> PartialAttention:
        first = index * width
        slots = first * page_size + jnp.arange(width * page_size)
        seen = visible_slots(context, slots, options)  # [B, T, S]
        stored = gather_pages(pages, lax.dynamic_slice(table, (0, first), (batch, width)))[:, 0]
        stored = jnp.where(seen.any(1)[..., None], stored, 0)  # [B, S, L + R]; 0 x NaN is NaN
        keys, values = _expanded(stored, key_up, value_up)
        scores = jnp.where(seen[:, None], scores_f32(queries, keys) * scale, MASKED)
        peak = jnp.max(scores, axis=-1)
        exps = jnp.exp(scores - peak[..., None])  # [B, Q, T, S]
        return PartialAttention(
            weighted_sum_f32(exps.astype(values.dtype), values), peak, exps.sum(-1)
        )

    found = in_blocks(attend, -(-jnp.max(kv_lens) // (width * page_size)), width < columns)
    out = found.weighted / found.total[..., None]
    return out.swapaxes(1, 2).astype(q.dtype)


def dense_heads(stored: Array, key_up: Array, value_up: Array) -> tuple[Array, Array]:
    """Keys [B, T, Q, D + R] and values [B, T, Q, Dv] of latents and rotated keys [B, T, L + R]."""
    keys, values = _expanded(stored, key_up, value_up)
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


def _expanded(stored: Array, key_up: Array, value_up: Array) -> tuple[Array, Array]:
    """Keys [B, Q, S, D + R] and values [B, Q, S, Dv] of stored [B, S, L + R]."""
    latent, rotated = jnp.split(stored, [key_up.shape[-1]], axis=-1)
    keys = einsum_f32("bsl,qdl->bqsd", latent, key_up).astype(stored.dtype)
    values = einsum_f32("bsl,qvl->bqsv", latent, value_up).astype(stored.dtype)
    shared = jnp.broadcast_to(rotated[:, None], (*keys.shape[:3], rotated.shape[-1]))
    return jnp.concatenate([keys, shared], axis=-1), values


def _slot_bytes(q: Array, value_up: Array) -> int:
    """Bytes of the scores, keys and values of a slot."""
    batch, num_tokens, num_heads, key_dim = q.shape
    entries = (key_dim + value_up.shape[1]) * q.dtype.itemsize
    return batch * num_heads * (4 * num_tokens + entries)
