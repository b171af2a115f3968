"""Which positions the tokens of a pass attend to where an indexer chooses: in paged caches, or over
whole sequences. See pallas_kernels/latent_attention/chosen.py and pools.py."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.rope import RopeConfig
from jaxspec.models.attention_heads import IndexHeads, LatentHeads, PooledIndexHeads
from jaxspec.models.norms import rms_norm
from jaxspec.models.rope import rope_angles
from pallas_kernels.latent_attention.chosen import best_slots, choose_slots
from pallas_kernels.latent_attention.pools import (
    Paths,
    Pools,
    WholePools,
    best_pools,
    choose_pooled_slots,
    chosen_positions,
    pool_ends,
    pool_keys,
    write_pooled,
)
from pallas_kernels.latent_attention.spans import SpanMeans, entries_of_whole, write_spans
from pallas_kernels.paged_attention.reference import MASKED
from pallas_kernels.pages import QueryContext
from pallas_kernels.products import einsum_f32
from pallas_kernels.rope_kv_write.reference import apply_rope, write_rows


@dataclasses.dataclass(frozen=True)
class MeanIndexHeads(IndexHeads):
    """IndexHeads of an indexer that scores spans of tokens by the means of their keys.

    Attributes:
      keys: [B, T, 1, D], neither normed nor rotated.
      span: N, the tokens of a span.
      norm: [D], of means, before they are rotated at the first position of their span.
    """

    span: int
    norm: Array
    eps: float
    rope: RopeConfig

    @property
    def most(self) -> int:
        """The most positions that a token attends to, its unfinished span's included."""
        return self.top_k + self.span - 1

    @property
    def spans(self) -> SpanMeans:
        """How keys of spans are made, as kernels take it."""
        return SpanMeans(self.span, self.keys.shape[-1], self._finished)

    def _finished(self, means: Array, positions: Array) -> Array:
        """Keys [B, n, D] of means, by the position of the first token of each."""
        normed = rms_norm(means, self.norm, self.eps)
        return apply_rope(normed[:, :, None, None], rope_angles(self.rope, positions))[:, :, 0, 0]


def written_keys(
    pages: Array, heads: IndexHeads, slots: Array, context: QueryContext, first_slot: int
) -> Array:
    """The pages of an indexer with what it keeps of tokens at ``slots`` [B, T]."""
    if isinstance(heads, PooledIndexHeads):
        return write_pooled(pages, heads.kept, slots, heads.places, context, first_slot)
    if isinstance(heads, MeanIndexHeads):
        return write_spans(pages, heads.kept, slots, heads.spans, context, first_slot)
    return write_rows(pages, heads.kept, slots)


def chosen_slots(
    pages: Array,
    heads: IndexHeads,
    context: QueryContext,
    first_slot: int,
    *,
    order_invariant: bool,
) -> Array | None:
    """The slots int32 [B, T, k] that tokens attend to (see LatentHeads.chosen); None where the
    table has no more of them than are chosen."""
    if context.page_table.shape[1] * pages.shape[2] <= heads.most:
        return None
    how = {"first_slot": first_slot, "order_invariant": order_invariant}
    of_tokens = heads.queries, heads.weights, pages, context
    if isinstance(heads, PooledIndexHeads | MeanIndexHeads):
        return choose_pooled_slots(*of_tokens, pools=_pools(heads), **how)
    return choose_slots(*of_tokens, top_k=heads.top_k, **how)


def dense_choice(heads: IndexHeads) -> Array | None:
    """The positions int32 [B, T, k] that the tokens of whole sequences attend to; None: all before
    them."""
    batch, size = heads.queries.shape[:2]
    if size <= heads.most:
        return None
    if not isinstance(heads, PooledIndexHeads | MeanIndexHeads):
        seen = jnp.broadcast_to(jnp.tri(size, dtype=bool), (batch, size, size))
        return best_slots(heads.queries, heads.weights, heads.keys[:, :, 0], seen, heads.top_k)
    pools = _pools(heads)
    ends = pool_ends(size, pools.size)
    whole = WholePools(_whole_keys(heads, len(ends)), ends)
    last = jnp.broadcast_to(jnp.arange(size), (batch, size))
    paths = Paths(last, jnp.zeros(batch, int), None)
    best = best_pools(heads.queries, heads.weights, whole, paths, pools)
    chosen = chosen_positions(best, last, pools)
    return jnp.sort(jnp.where(chosen < 0, size, chosen), axis=-1)


def chosen_mask(chosen: Array) -> Array:
    """Which tokens of whole sequences each token attends to, bool [B, T, T], of the positions
    [B, T, k] that were chosen."""
    batch, size = chosen.shape[:2]
    row, token = jnp.arange(batch)[:, None, None], jnp.arange(size)[:, None]
    return jnp.zeros((batch, size, size), bool).at[row, token, chosen].set(True, mode="drop")


def dense_chosen_attention(heads: LatentHeads, chosen: Array) -> Array:
    """Sums of latents [B, T, Q, L] of the chosen positions [B, T, k] of whole sequences."""
    size = chosen.shape[1]
    scores = einsum_f32("btqd,bsd->bqts", heads.absorbed, heads.stored[:, :, 0])
    scores = jnp.where(chosen_mask(chosen)[:, None], scores * heads.config.scale, MASKED)
    if heads.sinks is not None:  # as a last slot, of which no value is added
        sunk = jnp.broadcast_to(heads.sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sunk], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :size].astype(heads.stored.dtype)
    latents = heads.stored[:, :, 0, : heads.config.latent]
    return einsum_f32("bqts,bsl->btql", weights, latents).astype(heads.stored.dtype)


def _whole_keys(heads: PooledIndexHeads | MeanIndexHeads, count: int) -> Array:
    """The keys [B, n, D] of so many pools, which whole sequences begin with."""
    if isinstance(heads, MeanIndexHeads):
        return entries_of_whole(heads.keys, heads.spans)
    size, batch = len(heads.places), len(heads.keys)
    keys, gates = (
        x[:, : count * size, 0].reshape(batch, count, size, -1) for x in (heads.keys, heads.gates)
    )
    return pool_keys(keys, gates, heads.places)


def _pools(heads: PooledIndexHeads | MeanIndexHeads) -> Pools:
    size = heads.span if isinstance(heads, MeanIndexHeads) else len(heads.places)
    return Pools(size, heads.top_k)
