"""The input of attention to blocks of positions, and which of them tokens attend to: in paged
caches, or over whole sequences. See pallas_kernels/paged_attention/chosen_blocks.py."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import PagedIndexedKV
from jaxspec.config.blocks import BlockIndexConfig
from jaxspec.models.attention_heads import Heads
from pallas_kernels.latent_attention.pools import Paths
from pallas_kernels.paged_attention.chosen_blocks import (
    BlockOptions,
    attend_to_blocks,
    best_blocks,
    choose_blocks,
    positions_of_blocks,
)
from pallas_kernels.pages import LayerPages, QueryContext
from pallas_kernels.rope_kv_write.reference import write_rows


@dataclasses.dataclass(frozen=True)
class BlockHeads:
    """What stands for Heads in an Attend function: heads, and what chooses their blocks.

    Attributes:
      index_queries: [B, T, G, D], rotated, one of each KV head of the device.
      index_keys: [B, T, 1, D], rotated.
    """

    heads: Heads
    index_queries: Array
    index_keys: Array
    config: BlockIndexConfig

    def options(self, first_slot: int = 0, order_invariant: bool = False) -> BlockOptions:
        """What shapes a program of this attention."""
        config = self.config
        how = self.heads.scale, first_slot, order_invariant
        return BlockOptions(config.size, config.top_k, config.local, *how)


def with_index_keys(state: PagedIndexedKV, heads: BlockHeads, slots: Array) -> PagedIndexedKV:
    """The state with the index keys of tokens at ``slots`` [B, T]."""
    return state.replace(index_keys=write_rows(state.index_keys, heads.index_keys, slots))


def attend_to_chosen(
    queries: Array,
    state: PagedIndexedKV,
    heads: BlockHeads,
    context: QueryContext,
    options: BlockOptions,
) -> Array | None:
    """What queries [B, T, Q, D] attend to, the same of tokens whose keys are written; None where
    the table has no more blocks than are chosen."""
    if options.count(context.page_table.shape[1] * state.index_keys.shape[2]) <= options.top_k:
        return None
    blocks = choose_blocks(heads.index_queries, state.index_keys, context, options=options)
    pages = LayerPages(state.k, state.v, *heads.heads.scales)
    return attend_to_blocks(queries, pages, context, blocks, options=options)


def dense_seen(heads: BlockHeads) -> Array | None:
    """Which positions tokens of whole sequences attend to, for each KV head: bool [B, G, T, T];
    None: all before them."""
    batch, size = heads.index_queries.shape[:2]
    options = heads.options()
    if options.count(size) <= options.top_k:
        return None
    last = jnp.broadcast_to(jnp.arange(size), (batch, size))
    paths = Paths(last, jnp.zeros(batch, int), None)
    blocks = best_blocks(heads.index_queries, heads.index_keys[:, :, 0], paths, options)
    positions, seen = positions_of_blocks(blocks, last, options)
    row, token = jnp.arange(batch)[:, None, None, None], jnp.arange(size)[:, None, None]
    head = jnp.arange(blocks.shape[2])[:, None]
    attended = jnp.zeros((*blocks.shape[:3], size), bool)
    attended = attended.at[row, token, head, positions].set(seen, mode="drop")
    return jnp.moveaxis(attended, 1, 2)
