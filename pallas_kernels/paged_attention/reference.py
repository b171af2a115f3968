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
    if order_invariant:
        out = _softmax_times_values_f64(scores, v)
    else:
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = einsum_f32("bgrts,bgsd->btgrd", weights, v)
    return out.reshape(q.shape).astype(q.dtype)


def gather_pages(pages: Array, page_table: Array) -> Array:
    """Slots of each sequence in order: [P, G, K, D], [B, M] -> [B, G, M * K, D]."""
    batch, num_pages = page_table.shape
    _, kv_heads, page_size, head_dim = pages.shape
    gathered = pages.at[page_table].get(mode="promise_in_bounds")  # [B, M, G, K, D]
    return gathered.swapaxes(1, 2).reshape(batch, kv_heads, num_pages * page_size, head_dim)


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
    word, bit = jnp.maximum(beyond, 0) // 32, jnp.maximum(beyond, 0) % 32
    num_words = ancestors.shape[-1]
    words = jnp.take_along_axis(ancestors, jnp.minimum(word, num_words - 1)[:, None, :], axis=-1)
    set_bits = (words >> bit[:, None, :].astype(jnp.uint32)) & 1  # [B, T, S]
    in_tree = (past_context & (word < num_words))[:, None, :] & (set_bits == 1)
    return (committed[:, None, :] & in_window) | in_tree


def _softmax_times_values_f64(scores: Array, v: Array) -> Array:
    """Float64 sums round to the same float32 in (nearly) any order; the scores need no care."""
    exps = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    exps = exps.astype(v.dtype)
    with jax.enable_x64(True):
        wide = exps.astype(jnp.float64)
        out = jnp.einsum("bgrts,bgsd->btgrd", wide, v.astype(jnp.float64))
        out = out / jnp.einsum("bgrts->btgr", wide)[..., None]
        return out.astype(jnp.float32)
