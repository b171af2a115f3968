"""How the tokens of a pass attend to the past: paged, or dense for training and references.

The kernels that read or write pages are called here: rope_kv_write and paged, partial and latent
attention. forward_pass.py calls the other kernels of model code.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import PagedIndexedKV, PagedKV, PagedLatent
from jaxspec.cache.spread import local_slots
from jaxspec.config.mixers import LatentConfig
from jaxspec.models.attention_heads import Heads, IndexHeads, LatentHeads, PassKV, QueryHeads
from jaxspec.models.block_heads import BlockHeads, attend_to_chosen, dense_seen, with_index_keys
from jaxspec.models.dense_attention import (
    attention_to_visible,
    dense_causal_attention,
    visible_before,
)
from jaxspec.models.entry_heads import EntryHeads, attend_to_entries, dense_attend_to_entries
from jaxspec.models.sparse_choice import (
    chosen_mask,
    chosen_slots,
    dense_choice,
    dense_chosen_attention,
    written_keys,
)
from jaxspec.parallel import Axes, Layout
from jaxspec.parallel.collectives import shard_offset
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.latent_attention import latent_attention, latent_attention_with_sinks
from pallas_kernels.latent_attention.chosen import ChosenOptions, chosen_attention
from pallas_kernels.latent_attention.expanded import dense_heads, expanded_attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.chosen import chosen_heads_attention
from pallas_kernels.paged_attention.partial import partial_attention
from pallas_kernels.paged_attention.parts import PartialAttention, merge_partials, with_sinks
from pallas_kernels.paged_attention.reference import MASKED
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.rope_kv_write import rope_kv_write
from pallas_kernels.rope_kv_write.reference import HeadNorms, write_rows
from pallas_kernels.selection import NO_KERNELS


@pytree
class PagedAttend(Pytree):
    """Positions and slots of a pass's T tokens, and an Attend function over paged caches.

    When called, it writes the tokens' keys and values, then attends. A mixer that is not attention
    reads the fields instead.

    Attributes:
      rows: [B] index of each row in states with an entry per row.
      page_table: [B, M] pages of each sequence.
      context_lens: [B] committed slots.
      slots: [B, T] slots that the tokens' keys and values are written to (0: the null page).
      positions: [B, T] positions of the tokens in slots, for sliding windows.
      kv_lens: [B] end of each sequence's slots; kv_lens - context_lens of the T tokens are not
        padding.
      ancestors: [B, T, words] tree mask past the context, or None for consecutive tokens.
      first_slot, order_invariant: see paged_attention.
      split_tokens: devices that share sequences split the tokens (see Layout.split_tokens).
    """

    rows: Array = array("batch")
    page_table: Array = array("batch", "table")
    context_lens: Array = array("batch")
    slots: Array = array("batch", "length")
    positions: Array = array("batch", "length")
    kv_lens: Array = array("batch")
    ancestors: Array | None = array("batch", "nodes", "words", default=None)
    first_slot: int = static(default=0)
    order_invariant: bool = static(default=False)
    split_tokens: bool = static(default=False)

    @property
    def is_token(self) -> Array:
        """Bool [B, T]: False for padding, and for the tree nodes of rows that do not decode.

        Nodes are always written. Of consecutive tokens some are in their slots already.
        """
        if self.ancestors is not None:
            return self.slots > 0
        return jnp.arange(self.slots.shape[1]) < (self.kv_lens - self.context_lens)[:, None]

    @property
    def context(self) -> QueryContext:
        """What the tokens see, as kernels take it."""
        lens, ends = self.context_lens, self.kv_lens
        return QueryContext(self.page_table, lens, self.positions, self.ancestors, ends)

    def _options(self, heads: Heads | QueryHeads, window: int | None) -> AttentionOptions:
        chunk = heads.chunk if isinstance(heads, Heads) else None
        return AttentionOptions(window, heads.scale, heads.softcap, self.first_slot, chunk)

    def __call__(self, state: Any, heads: Any, window: int | None) -> tuple[Any, Any]:
        if isinstance(heads, IndexHeads):
            return self._chosen(state, heads)
        if isinstance(heads, LatentHeads):
            return self._latent(state, heads)
        if isinstance(heads, EntryHeads):
            how = heads.options(self.first_slot, self.order_invariant)
            return attend_to_entries(state, heads, self.slots, self.context, how)
        if isinstance(heads, BlockHeads):
            return self._of_blocks(state, heads)
        if isinstance(heads, QueryHeads):
            return self.attended(heads.rotated, state, heads, window), state
        return self._of_heads(state, heads, window)

    def _of_heads(self, state: PagedKV, heads: Heads, window: int | None) -> tuple[Array, PagedKV]:
        queries, state = write_heads(state, heads, self.slots)
        return self.attended(queries, state, heads, window), state

    def _of_blocks(self, state: PagedIndexedKV, heads: BlockHeads) -> tuple[Any, PagedIndexedKV]:
        """Attention to the blocks that index heads choose; to all where a table has no more."""
        queries, state = write_heads(state, heads.heads, self.slots)
        state = with_index_keys(state, heads, self.slots)
        how = heads.options(self.first_slot, self.order_invariant)
        out = attend_to_chosen(queries, state, heads, self.context, how)
        return self.attended(queries, state, heads.heads, None) if out is None else out, state

    def attended(
        self, queries: Array, state: PagedKV, heads: Heads | QueryHeads, window: int | None
    ) -> Array:
        """What the pass's tokens attend to, whose keys and values are written: queries and result
        [B, T, Q, D]. ``heads`` are those that ``queries`` are of."""
        if state.spread:
            return self._spread(queries, state, heads, window)
        if isinstance(heads, Heads) and heads.chosen is not None:
            return chosen_heads_attention(
                queries,
                LayerPages(state.k, state.v, *heads.scales),
                self.page_table,
                heads.chosen,
                scale=heads.scale,
                order_invariant=self.order_invariant,
            )
        kernels = heads.kernels
        if heads.sinks is not None and "attention_sinks" not in kernels:
            kernels = NO_KERNELS
        return paged_attention(
            queries,
            LayerPages(state.k, state.v, *heads.scales),
            self.context,
            heads.sinks,
            options=self._options(heads, window),
            order_invariant=self.order_invariant,
            implementation=kernels.over_pages("paged_attention", state.k),
        )

    def _chosen(self, state: PagedLatent, heads: IndexHeads) -> tuple[Array | None, PagedLatent]:
        """The positions that the tokens attend to; None where the table has no more of them than
        are chosen."""
        assert state.index_keys is not None
        where = self.context, self.first_slot
        pages = written_keys(state.index_keys, heads, self.slots, *where)
        state = state.replace(index_keys=pages)
        return chosen_slots(pages, heads, *where, order_invariant=self.order_invariant), state

    def _latent(self, state: PagedLatent, heads: LatentHeads) -> tuple[Array, PagedLatent]:
        pages = write_rows(state.pages, heads.stored, self.slots)
        state = state.replace(pages=pages)
        if heads.chosen is not None:
            options = ChosenOptions(heads.config.latent, heads.config.scale, self.order_invariant)
            where = pages, self.page_table, heads.chosen, heads.sinks
            return heads.values(chosen_attention(heads.absorbed, *where, options=options)), state
        if heads.sinks is not None:
            how = AttentionOptions(scale=heads.config.scale, first_slot=self.first_slot)
            given = heads.absorbed, pages, self.context, heads.sinks
            more: Any = {"latent": heads.config.latent, "order_invariant": self.order_invariant}
            out = latent_attention_with_sinks(*given, options=how, **more)
            return heads.values(out), state
        if self._expands(heads.config, pages.shape[2]):
            out = expanded_attention(
                heads.queries,
                pages,
                heads.key_up,
                heads.value_up,
                self.context,
                scale=heads.config.scale,
                first_slot=self.first_slot,
            )
            return out, state
        kernels = heads.kernels
        # The TPU kernel of paged attention takes latents, too.
        name = "paged_attention" if kernels.backend == "mosaic_tpu" else "latent_attention"
        out = latent_attention(
            heads.absorbed,
            pages,
            self.context,
            latent=heads.config.latent,
            scale=heads.config.scale,
            first_slot=self.first_slot,
            order_invariant=self.order_invariant,
            implementation=kernels.over_pages(name, pages),
        )
        return heads.values(out), state

    def _expands(self, config: LatentConfig, page_size: int) -> bool:
        """Whether keys and values of the heads are computed from latents: for a prompt's tokens
        only, so that all trees are verified alike, and not where the sums of a token must not
        depend on how its prompt was cut."""
        if self.ancestors is not None or self.order_invariant:
            return False
        return config.expands(self.slots.shape[1], self.page_table.shape[1] * page_size)

    def _spread(
        self, queries: Array, state: PagedKV, heads: Heads | QueryHeads, window: int | None
    ) -> Array:
        """``attended`` where devices have a part of every page each: all queries attend to each
        part, and the parts of their softmaxes are merged.

        Raises ValueError for sums that must not depend on the order of slots.
        """
        if self.order_invariant:
            raise ValueError(
                "sums that do not depend on the order of slots need whole sequences on a device: "
                "take sp 1, or leave out deterministic and verify_width"
            )
        local_size, axes = state.k.shape[2], state.spread
        part = partial_attention(
            queries,
            LayerPages(state.k, state.v, *heads.scales),
            self.context,
            shard_offset(local_size, axes),
            page_size=state.page_size,
            options=self._options(heads, window),
            implementation=heads.kernels.over_pages("partial_attention", state.k),
        )
        return _merged(part, axes, heads.local_count, heads.sinks).astype(queries.dtype)


def layout_of_pass(layout: Layout, attend: Any) -> Layout:
    """A model's layout in a pass whose tokens attend so."""
    splits = isinstance(attend, PagedAttend) and attend.split_tokens
    return layout.split_tokens if splits else layout


def write_heads[S: PagedKV](state: S, heads: Heads, slots: Array) -> tuple[Array, S]:
    """Queries [B, T, Q, D] of all tokens, and the state with their keys and values at ``slots``
    [B, T]."""
    if state.spread:
        heads, slots = heads.of_all_tokens(), local_slots(slots, state.k.shape[2], state.spread)
    queries, k, v = rope_kv_write(
        heads.partials,
        heads.rope,
        HeadNorms(heads.q_norm, heads.k_norm),
        LayerPages(state.k, state.v, *heads.scales),
        slots,
        eps=heads.eps,
        dtype=heads.dtype,
        implementation=heads.kernels.over_pages("rope_kv_write", state.k),
    )
    return heads.scaled(queries), state.replace(k=k, v=v)


@jax.named_scope("attention")
def _merged(
    part: PartialAttention, axes: Axes, local_count: int | None, sinks: Array | None
) -> Array:
    """Attention over the slots of all devices: float32 [B, T, Q, D]. In one collective.

    ``local_count``: each device gets the next so many tokens only, with padding after the last.
    """
    if sinks is not None:  # one device has the slot
        is_first = lax.axis_index(axes) == 0
        part = with_sinks(part, jnp.where(is_first, sinks, MASKED))
    packed = jnp.concatenate([part.weighted, jnp.stack([part.peak, part.total], -1)], axis=-1)
    if local_count is None:
        parts = lax.all_gather(packed, axes)
    else:
        missing = local_count * lax.axis_size(axes) - packed.shape[1]
        padded = jnp.pad(packed, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=1.0)
        split = padded.reshape(packed.shape[0], -1, local_count, *packed.shape[2:])
        parts = lax.all_to_all(split.swapaxes(0, 1), axes, split_axis=0, concat_axis=0)
    return merge_partials(PartialAttention(parts[..., :-2], parts[..., -2], parts[..., -1]))


def dense_causal_attend(
    state: PassKV | None,
    heads: Heads | LatentHeads | QueryHeads | IndexHeads | EntryHeads | BlockHeads,
    window: int | None,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> tuple[Any, PassKV | None]:
    """An Attend function over the pass's own T tokens, without a cache. Keys and values are kept
    for layers that read those of another one: in a PassKV."""
    if isinstance(heads, IndexHeads):
        return dense_choice(heads), state
    if isinstance(heads, EntryHeads):
        return dense_attend_to_entries(heads), state
    if isinstance(heads, LatentHeads):
        return _dense_latent_attention(heads, window, implementation), state
    if isinstance(heads, BlockHeads):
        seen, heads = dense_seen(heads), heads.heads
        if seen is not None:
            how = seen[:, :, None], heads.scale, None, None
            return attention_to_visible(*heads.rotated(), *how), state
    if isinstance(heads, Heads) and (heads.chunk is not None or heads.chosen is not None):
        seen = visible_before(heads.rope.shape[1], window, heads.chunk)
        if heads.chosen is not None:
            seen = chosen_mask(heads.chosen)[:, None, None]
        how = seen, heads.scale, heads.softcap, heads.sinks
        return attention_to_visible(*heads.rotated(), *how), state
    how = window, implementation, heads.scale, heads.softcap, heads.sinks
    if isinstance(heads, QueryHeads):
        assert state is not None and state.k is not None and state.v is not None
        return dense_causal_attention(heads.rotated, state.k, state.v, *how), state
    queries, k, v = heads.rotated()
    kept = None if state is None else PassKV(k=k, v=v)
    return dense_causal_attention(queries, k, v, *how), kept


def _dense_latent_attention(
    heads: LatentHeads, window: int | None, implementation: Literal["xla", "cudnn"]
) -> Array:
    """Values [B, T, Q, Dv]."""
    size = heads.stored.shape[1]
    if heads.chosen is not None:
        return heads.values(dense_chosen_attention(heads, heads.chosen))
    attend = functools.partial(
        dense_causal_attention,
        window=window,
        implementation=implementation,
        scale=heads.config.scale,
        sinks=heads.sinks,
    )
    if not heads.config.expands(size, size):
        queries = heads.absorbed
        attended = attend(queries, heads.stored, heads.stored)
        return heads.values(attended[..., : heads.config.latent])
    k, v = dense_heads(heads.stored[:, :, 0], heads.key_up, heads.value_up)
    width = max(k.shape[-1], v.shape[-1])  # dense attention has one width
    q, k, v_wide = (
        jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (heads.queries, k, v)
    )
    return attend(q, k, v_wide)[..., : v.shape[-1]]
