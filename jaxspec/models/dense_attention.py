"""Attention over whole sequences without a cache: for training and references."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.reference import MASKED, capped
from pallas_kernels.products import einsum_f32


def dense_causal_attention(
    q: Array,
    k: Array,
    v: Array,
    window: int | None = None,
    implementation: Literal["xla", "cudnn"] = "xla",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Causal attention: q [B, T, Q, D], k and v [B, T, G, D] -> [B, T, Q, D].

    ``cudnn`` is a flash kernel for bfloat16 on NVIDIA GPUs: it never writes the [T, T] scores. It
    has no soft cap and no sinks: with one of them ``xla`` runs. ``scale`` and ``softcap``: see
    AttentionConfig; ``sinks`` [Q]: see paged_attention.
    """
    if softcap is not None or sinks is not None:
        visible = visible_before(q.shape[1], window)
        return attention_to_visible(q, k, v, visible, scale, softcap, sinks)
    local = None if window is None else (window - 1, 0)
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else None):
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=local,
            implementation=implementation,
            scale=scale,
        )
    return jnp.asarray(out)


def attention_to_visible(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    """dense_causal_attention with scores that are written out, to positions that are ``visible``
    [T, S], of each sequence [B, 1, 1, T, S], or of its KV heads [B, G, 1, T, S]."""
    *outer, head_dim = q.shape
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, head_dim)  # [B, T, G, R, D]
    scores = einsum_f32("btgrd,bsgd->bgrts", grouped, k)
    scores = capped(scores * (head_dim**-0.5 if scale is None else scale), softcap)
    scores = jnp.where(visible, scores, MASKED)
    if sinks is not None:  # as a last slot, of which no value is added
        sink_scores = sinks.astype(scores.dtype).reshape(*scores.shape[1:3], 1, 1)
        sink_scores = jnp.broadcast_to(sink_scores, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink_scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    out = einsum_f32("bgrts,bsgd->btgrd", weights, v)
    return out.astype(q.dtype).reshape(*outer, head_dim)


def visible_before(size: int, window: int | None, chunk: int | None = None) -> Array:
    """Which of as many tokens each token sees: bool [T, T]."""
    token = jnp.arange(size)
    behind = token[:, None] - token
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return visible if chunk is None else visible & (token[:, None] // chunk == token // chunk)
