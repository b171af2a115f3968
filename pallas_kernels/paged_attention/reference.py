"""The specification of paged attention in jnp; it runs where the kernel does not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import decode
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.products import scores_f32, weighted_sum_f32

MASKED = -1e30  # finite, so that a row that sees no slot gives no NaN


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("options", "order_invariant"))
def paged_attention_reference(
    q: Array,  # [B, T, Q, D]
    pages: LayerPages,
    context: QueryContext,
    sinks: Array | None = None,  # [Q]
    *,
    options: AttentionOptions,
    order_invariant: bool,
) -> Array:
    """See pallas_kernels.paged_attention.paged_attention."""
    slots = jnp.arange(context.page_table.shape[1] * pages.k.shape[2])
    visible = visible_slots(context, slots, options)
    scores, v = masked_scores(q, pages, context.page_table, visible, options, order_invariant)
    rows = None if sinks is None else _sinks_of_rows(sinks, scores.shape)
    out = by_head(softmax_times_values(scores, v, order_invariant, rows), pages.v_scale)
    return by_token(out, q.shape).astype(q.dtype)


def masked_scores(
    q: Array,  # [B, T, Q, D]
    layer: LayerPages,
    page_table: Array,  # [B, M]
    visible: Array,  # bool [B, T, S]
    options: AttentionOptions,
    order_invariant: bool = False,
) -> tuple[Array, Array]:
    """Scores of the queries of each KV head, MASKED where a slot is not visible, and the values,
    not yet multiplied by their scales: float32 [B, G, T * R, S] and [B, G, S, D]."""
    factor = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    batch, num_tokens, num_heads, head_dim = q.shape
    kv_heads, num_slots = layer.k.shape[1], visible.shape[-1]
    # Slots that no query sees may hold NaN. A weight of 0 would not remove it (0 x NaN is NaN),
    # neither from the sum nor from a gradient, so those slots are replaced by 0.
    seen = jnp.any(visible, axis=1)[:, None, :, None]
    k, v = (
        jnp.where(seen, decode(gather_pages(pages, page_table), q.dtype), 0)  # [B, G, S, D]
        for pages in (layer.k, layer.v)
    )
    rows = num_tokens * num_heads // kv_heads  # queries that share a KV head, of all T tokens
    grouped = q.reshape(batch, num_tokens, kv_heads, -1, head_dim).swapaxes(1, 2)
    grouped = grouped.reshape(batch, kv_heads, rows, head_dim)
    if order_invariant:
        scores = scaled_scores_f64(grouped, k, factor)  # [B, G, T * R, S]
    else:
        scores = scores_f32(grouped, k) * factor
    scores = capped(by_head(scores, layer.k_scale), options.softcap)
    split = scores.reshape(batch, kv_heads, num_tokens, -1, num_slots)
    return jnp.where(visible[:, None, :, None], split, MASKED).reshape(scores.shape), v


def capped(scores: Array, softcap: float | None) -> Array:
    """softcap * tanh(scores / softcap); None: the scores as they are."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def by_head(x: Array, scale: Array | None) -> Array:
    """x [B, G, ...] times the scales [G] of its KV heads; None: x as it is."""
    return x if scale is None else x * scale.reshape(-1, *(1,) * (x.ndim - 2))


def by_token(x: Array, shape: tuple[int, ...]) -> Array:
    """Results of the queries of each KV head [B, G, T * R, D] in the queries' ``shape``."""
    batch, num_tokens, _, head_dim = shape
    split = x.reshape(batch, x.shape[1], num_tokens, -1, head_dim)
    return split.swapaxes(1, 2).reshape(shape)


def gather_pages(pages: Array, page_table: Array) -> Array:
    """The slots of each sequence in order: [P, G, K, D], [B, M] -> [B, G, M * K, D]."""
    batch, num_pages = page_table.shape
    _, kv_heads, page_size, head_dim = pages.shape
    heads = jnp.arange(kv_heads)[:, None]
    # One gather of (page, head) tiles. Gathering whole pages would need a transpose afterwards.
    tiles = pages.at[page_table[:, None, :], heads].get(mode="promise_in_bounds")
    return tiles.reshape(batch, kv_heads, num_pages * page_size, head_dim)


def visible_slots(context: QueryContext, slots: Array, options: AttentionOptions) -> Array:
    """Which of a sequence's ``slots`` [S] each query sees: bool [B, T, S]."""
    _, context_lens, positions, ancestors, _ = context
    if options.chunk is not None:
        return _visible_in_chunk(context, slots, options)
    beyond = slots - context_lens[:, None]  # [B, S], index past the committed context
    committed = (beyond < 0) & (slots >= options.first_slot)
    past_context = (beyond >= 0) & (slots >= options.first_slot)
    window = options.window
    in_window = True if window is None else positions[:, :, None] - slots < window
    if ancestors is None:
        causal = beyond[:, None, :] <= jnp.arange(positions.shape[1])[:, None]
        seen = (committed[:, None, :] | past_context[:, None, :] & causal) & in_window
    else:
        in_tree = past_context[:, None, :] & _bit_of(ancestors, jnp.maximum(beyond, 0)[:, None, :])
        seen = (committed[:, None, :] & in_window) | in_tree
    return seen & (slots < context.ends[:, None, None])


def _visible_in_chunk(context: QueryContext, slots: Array, options: AttentionOptions) -> Array:
    """visible_slots of queries that see their own chunk only.

    A query's ancestors come before it by depth. So those of earlier chunks are the first of them,
    as many as there are positions between the context and the chunk.
    """
    assert options.chunk is not None
    start = context.positions // options.chunk * options.chunk  # [B, T]
    if context.ancestors is not None:
        hidden = start - context.context_lens[:, None]
        context = context._replace(ancestors=_without_first(context.ancestors, hidden))
    whole = visible_slots(context, slots, dataclasses.replace(options, chunk=None))
    is_node = slots >= context.context_lens[:, None]  # [B, S]
    in_chunk = slots >= start[..., None]
    if context.ancestors is not None:
        in_chunk |= is_node[:, None]
    return whole & in_chunk


def _without_first(masks: Array, counts: Array) -> Array:
    """Masks uint32 [B, T, words] without so many [B, T] of their lowest set bits."""
    shifts = jnp.arange(32, dtype=jnp.uint32)
    bits = (masks[..., None] >> shifts) & 1  # [B, T, words, 32]
    flat = bits.reshape(*masks.shape[:2], -1).astype(jnp.int32)
    before = jnp.cumsum(flat, axis=-1) - flat
    kept = flat * (before >= counts[..., None])
    words = kept.astype(jnp.uint32).reshape(bits.shape) << shifts
    return jnp.sum(words, axis=-1, dtype=jnp.uint32)


def _bit_of(mask: Array, index: Array) -> Array:
    """Bit ``index`` [B, 1, S] of each mask [B, T, words]; False past its end: bool [B, T, S].

    The word is selected with jnp.where. XLA would repeat a gather inside every layer's softmax
    (measured on an H100: 19 us per layer).
    """
    chosen = jnp.uint32(0)
    for word in range(mask.shape[-1]):
        chosen = jnp.where(index // 32 == word, mask[:, :, word, None], chosen)
    return (chosen >> (index % 32).astype(jnp.uint32)) & 1 == 1


def scaled_scores_f64(q: Array, k: Array, scale: float) -> Array:
    """q [B, G, M, D] times k [B, G, S, D] over D, times the scale: float32 [B, G, M, S].

    Summed in float64, since a product of another number of slots may add up in another order.
    """
    with jax.enable_x64(True):
        scores = jnp.einsum("bgmd,bgsd->bgms", q.astype(jnp.float64), k.astype(jnp.float64))
        return (scores * scale).astype(jnp.float32)


def _sinks_of_rows(sinks: Array, shape: tuple[int, ...]) -> Array:
    """Sinks [Q] for scores of ``shape`` [B, G, T * R, S]: float32 [G, T * R, 1]."""
    _, kv_heads, rows, _ = shape
    group = len(sinks) // kv_heads
    per_head = sinks.astype(jnp.float32).reshape(kv_heads, group)
    return jnp.tile(per_head, (1, rows // group))[..., None]


def softmax_times_values(
    scores: Array, v: Array, order_invariant: bool, sinks: Array | None = None
) -> Array:
    """softmax(scores [B, G, M, S]) times v [B, G, S, D], normalized last: float32 [B, G, M, D].

    ``sinks``: [G, M, 1] one more score, of a value of zero. With ``order_invariant`` the sums over
    slots are in float64: they round to the same float32 in (nearly) any order.
    """
    peak = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks)
    exps = jnp.exp(scores - peak)
    sunk = None if sinks is None else jnp.exp(sinks - peak)
    if not order_invariant:
        total = jnp.sum(exps, axis=-1)[..., None]
        total = total if sunk is None else total + sunk
        return weighted_sum_f32(exps.astype(v.dtype), v) / total
    with jax.enable_x64(True):
        wide = exps.astype(v.dtype).astype(jnp.float64)
        out = jnp.einsum("bgms,bgsd->bgmd", wide, v.astype(jnp.float64))
        total = jnp.sum(wide, axis=-1)[..., None]
        total = total if sunk is None else total + sunk.astype(jnp.float64)
        return (out / total).astype(jnp.float32)
