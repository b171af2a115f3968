"""Which positions the tokens of a pass attend to where an indexer chooses: in paged caches, or over
whole sequences. See pallas_kernels/latent_attention/chosen.py and pools.py."""

import jax.numpy as jnp
from jax import Array

from jaxspec.models.attention_heads import IndexHeads, PooledIndexHeads
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
from pallas_kernels.pages import QueryContext
from pallas_kernels.rope_kv_write.reference import write_rows


def written_keys(
    pages: Array, heads: IndexHeads, slots: Array, context: QueryContext, first_slot: int
) -> Array:
    """The pages of an indexer with what it keeps of tokens at ``slots`` [B, T]."""
    if isinstance(heads, PooledIndexHeads):
        return write_pooled(pages, heads.kept, slots, heads.places, context, first_slot)
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
    if isinstance(heads, PooledIndexHeads):
        return choose_pooled_slots(*of_tokens, pools=_pools(heads), **how)
    return choose_slots(*of_tokens, top_k=heads.top_k, **how)


def dense_choice(heads: IndexHeads) -> Array | None:
    """The positions int32 [B, T, k] that the tokens of whole sequences attend to; None: all before
    them."""
    batch, size = heads.queries.shape[:2]
    if size <= heads.most:
        return None
    keys = heads.keys[:, :, 0]
    if not isinstance(heads, PooledIndexHeads):
        seen = jnp.broadcast_to(jnp.tri(size, dtype=bool), (batch, size, size))
        return best_slots(heads.queries, heads.weights, keys, seen, heads.top_k)
    pools = _pools(heads)
    ends = pool_ends(size, pools.size)
    keys, gates = (
        x[:, : len(ends) * pools.size].reshape(batch, len(ends), pools.size, -1)
        for x in (keys, heads.gates[:, :, 0])
    )
    whole = WholePools(pool_keys(keys, gates, heads.places), ends)
    last = jnp.broadcast_to(jnp.arange(size), (batch, size))
    paths = Paths(last, jnp.zeros(batch, int), None)
    best = best_pools(heads.queries, heads.weights, whole, paths, pools)
    chosen = chosen_positions(best, last, pools)
    return jnp.sort(jnp.where(chosen < 0, size, chosen), axis=-1)


def _pools(heads: PooledIndexHeads) -> Pools:
    return Pools(len(heads.places), heads.top_k)
