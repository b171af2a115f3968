"""The specification of paged attention in jnp, and its path on CPU and TPU."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.products import einsum_f32

MASKED = -1e30  # finite, so that a row that sees nothing stays free of NaN


def paged_attention_reference(
    q: Array,  # [B, T, Q, D]
    k_pages: Array,  # [P, G, K, D]
    v_pages: Array,
    page_table: Array,  # [B, M]
    context_lens: Array,  # [B]
    positions: Array,  # [B, T]
    ancestors: Array | None,  # [B, T, words]
    *,
    window: int | None,
    first_slot: int,
    order_invariant: bool,
) -> Array:
    """See pallas_kernels.paged_attention.paged_attention."""
    batch, num_tokens, num_heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    k, v = gather_pages(k_pages, page_table), gather_pages(v_pages, page_table)  # [B, G, S, D]
    num_slots = k.shape[2]
    grouped = q.reshape(batch, num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    scores = einsum_f32("btgrd,bgsd->bgrts", grouped, k)
    visible = visible_slots(context_lens, positions, ancestors, num_slots, window, first_slot)
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, MASKED)
    out = _softmax_times_values(scores, v, order_invariant)
    return out.reshape(q.shape).astype(q.dtype)


def gather_pages(pages: Array, page_table: Array) -> Array:
    """Slots of each sequence in order: [P, G, K, D], [B, M] -> [B, G, M * K, D]."""
    batch, num_pages = page_table.shape
    _, kv_heads, page_size, head_dim = pages.shape
    heads = jnp.arange(kv_heads)[:, None]
    # One gather of (page, head) tiles: gathering whole pages would need a transposition after it.
    tiles = pages.at[page_table[:, None, :], heads].get(mode="promise_in_bounds")
    return tiles.reshape(batch, kv_heads, num_pages * page_size, head_dim)


def visible_slots(
    context_lens: Array,  # [B]
    positions: Array,  # [B, T]
    ancestors: Array | None,  # [B, T, words]
    num_slots: int,
    window: int | None,
    first_slot: int,
) -> Array:
    """Which slots each query sees: bool [B, T, S]."""
    slots = jnp.arange(num_slots)
    beyond = slots - context_lens[:, None]  # [B, S], index past the committed context
    committed = (beyond < 0) & (slots >= first_slot)
    past_context = (beyond >= 0) & (slots >= first_slot)
    in_window = True if window is None else positions[:, :, None] - slots < window
    if ancestors is None:
        causal = beyond[:, None, :] <= jnp.arange(positions.shape[1])[:, None]
        return (committed[:, None, :] | past_context[:, None, :] & causal) & in_window
    in_tree = past_context[:, None, :] & _bit_of(ancestors, jnp.maximum(beyond, 0)[:, None, :])
    return (committed[:, None, :] & in_window) | in_tree


def _bit_of(mask: Array, index: Array) -> Array:
    """Bit ``index`` [B, 1, S] of each mask [B, T, words]; False past its end: bool [B, T, S].

    A choice among the few words, not a gather, which XLA would repeat inside every layer's softmax
    (measured on an H100: 19 us a layer).
    """
    chosen = jnp.uint32(0)
    for word in range(mask.shape[-1]):
        chosen = jnp.where(index // 32 == word, mask[:, :, word, None], chosen)
    return (chosen >> (index % 32).astype(jnp.uint32)) & 1 == 1


def _softmax_times_values(scores: Array, v: Array, order_invariant: bool) -> Array:
    """softmax(scores [B, G, R, T, S]) times v [B, G, S, D], normalized last: f32 [B, T, G, R, D].

    Float64 sums round to the same float32 in (nearly) any order; the scores themselves need no
    such care.
    """
    exps = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    if not order_invariant:
        out = einsum_f32("bgrts,bgsd->btgrd", exps.astype(v.dtype), v)
        return out / jnp.sum(exps, axis=-1).transpose(0, 3, 1, 2)[..., None]
    with jax.enable_x64(True):
        wide = exps.astype(v.dtype).astype(jnp.float64)
        out = jnp.einsum("bgrts,bgsd->btgrd", wide, v.astype(jnp.float64))
        out = out / jnp.einsum("bgrts->btgr", wide)[..., None]
        return out.astype(jnp.float32)
