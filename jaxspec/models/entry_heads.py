"""The input of attention to a window and to entries, and what tokens attend to: in paged caches, or
over whole sequences. See pallas_kernels/latent_attention/entries.py and spans.py."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import PagedEntries
from jaxspec.config.entries import EntryAttentionConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.norms import rms_norm
from jaxspec.models.rope import halves_of_pairs, rope_angles
from pallas_kernels.latent_attention.entries import (
    EntryOptions,
    IndexQueries,
    dense_entry_attention,
    entry_attention,
    entry_ends,
)
from pallas_kernels.latent_attention.pools import Paths, Pools, WholePools, best_pools
from pallas_kernels.latent_attention.spans import Spans, entries_of_whole, write_spans
from pallas_kernels.pages import QueryContext
from pallas_kernels.rope_kv_write.reference import apply_rope, write_rows


def rotated_last(x: Array, angles: Array) -> Array:
    """Heads [B, T, n, D] of which the last entries are rotated, 2 i and 2 i + 1 as a pair, by
    ``rope_angles`` [B, T, 2, 2, R / 2]: in an order in which i and i + R / 2 are a pair."""
    plain, rotary = jnp.split(x, [x.shape[-1] - 2 * angles.shape[-1]], axis=-1)
    rotary = apply_rope(halves_of_pairs(rotary)[:, :, None], angles)[:, :, 0]
    return jnp.concatenate([plain, rotary], axis=-1)


def rotated_back(x: Array, angles: Array) -> Array:
    """The reverse of ``rotated_last``, with the order of pairs that it reads."""
    plain, rotary = jnp.split(x, [x.shape[-1] - 2 * angles.shape[-1]], axis=-1)
    back = angles * jnp.array([1.0, -1.0])[:, None, None]
    rotary = apply_rope(rotary[:, :, None], back)[:, :, 0]
    halves = rotary.reshape(*rotary.shape[:-1], 2, -1)
    pairs = jnp.moveaxis(halves, -2, -1).reshape(rotary.shape)
    return jnp.concatenate([plain, pairs], axis=-1)


@dataclasses.dataclass(frozen=True)
class SpanRows:
    """What entries are made of.

    Attributes:
      rows: [B, T, 1, 2 * C], values and gates of the tokens.
      places: [N, C], what is added to gates by a token's place in its span.
      norm: [D], of entries, before they are rotated at the first position of their span.
      overlapping: C is 2 * D, else D.
    """

    rows: Array
    places: Array
    norm: Array
    eps: float
    rope: RopeConfig
    overlapping: bool

    @property
    def spans(self) -> Spans:
        """How entries are made, as kernels take it."""
        return Spans(self.places, self._finished, self.overlapping)

    def _finished(self, sums: Array, positions: Array) -> Array:
        """Entries [B, n, D] of sums, by the position of the first token of each."""
        normed = rms_norm(sums, self.norm, self.eps)
        return rotated_last(normed[:, :, None], rope_angles(self.rope, positions))[:, :, 0]


@dataclasses.dataclass(frozen=True)
class EntryIndexHeads:
    """What an indexer computes of a pass's tokens.

    Attributes:
      queries: [B, T, I, D], of I heads, rotated.
      weights: float32 [B, T, I], times the scale of the scores.
      keys: what its keys are made of.
      top_k: most entries that a token attends to.
    """

    queries: Array
    weights: Array
    keys: SpanRows
    top_k: int


@dataclasses.dataclass(frozen=True)
class EntryHeads:
    """What stands for Heads in an Attend function, which returns sums of vectors [B, T, Q, D].

    Attributes:
      queries: [B, T, Q, D], rotated.
      vectors: [B, T, 1, D], rotated: of the tokens.
      sinks: float32 [Q], see paged_attention.
      spans: what entries are made of; None: there are none.
      index: None: a token attends to all entries that it sees.
    """

    queries: Array
    vectors: Array
    sinks: Array
    config: EntryAttentionConfig
    spans: SpanRows | None = None
    index: EntryIndexHeads | None = None

    def options(self, first_slot: int = 0, order_invariant: bool = False) -> EntryOptions:
        """What shapes a program of this attention."""
        return EntryOptions(self.config.window, self.config.scale, first_slot, order_invariant)


def attend_to_entries(
    state: PagedEntries, heads: EntryHeads, slots: Array, context: QueryContext, how: EntryOptions
) -> tuple[Array, PagedEntries]:
    """What tokens attend to, which are written to ``slots`` [B, T]: sums [B, T, Q, D], and the
    state after."""
    pages = write_rows(state.pages, heads.vectors, slots)
    state = state.replace(pages=pages)
    entries, columns = None, (0, 0)
    if heads.spans is not None:
        assert state.spans is not None
        spans, first = heads.spans.spans, how.first_slot
        kept = write_spans(state.spans, heads.spans.rows, slots, spans, context, first)
        state, index = _with_index_keys(state.replace(spans=kept), heads, slots, context, first)
        ends = entry_ends(context, spans.size, pages.shape[2], index, first, how.order_invariant)
        entries, columns = (kept, ends), spans.columns
    out = entry_attention(
        heads.queries, pages, context, heads.sinks, entries, columns=columns, options=how
    )
    return out, state


def _with_index_keys(
    state: PagedEntries, heads: EntryHeads, slots: Array, context: QueryContext, first_slot: int
) -> tuple[PagedEntries, IndexQueries | None]:
    """The state with the keys of the indexer, if there is one, and its queries."""
    index = heads.index
    if index is None:
        return state, None
    assert state.index_spans is not None
    spans = index.keys.spans
    kept = write_spans(state.index_spans, index.keys.rows, slots, spans, context, first_slot)
    queries = IndexQueries(index.queries, index.weights, kept, spans.columns, index.top_k)
    return state.replace(index_spans=kept), queries


def dense_attend_to_entries(heads: EntryHeads) -> Array:
    """``attend_to_entries`` over whole sequences, of which nothing is kept."""
    entries = None
    if heads.spans is not None:
        made = entries_of_whole(heads.spans.rows, heads.spans.spans)
        entries = made, _seen_entries(heads, made.shape[1])
    vectors = heads.vectors[:, :, 0]
    return dense_entry_attention(heads.queries, vectors, entries, heads.sinks, heads.options())


def _seen_entries(heads: EntryHeads, count: int) -> Array:
    """Which of so many entries the tokens of whole sequences attend to: bool [B, T, n]."""
    assert heads.spans is not None
    batch, num_tokens = heads.queries.shape[:2]
    size, index = heads.spans.spans.size, heads.index
    last = jnp.broadcast_to(jnp.arange(num_tokens), (batch, num_tokens))
    ends = size - 1 + size * jnp.arange(count)
    if index is None or count <= index.top_k:
        return ends <= last[..., None]
    whole = WholePools(entries_of_whole(index.keys.rows, index.keys.spans), ends)
    paths, pools = Paths(last, jnp.zeros(batch, int), None), Pools(size, index.top_k * size)
    best = best_pools(index.queries, index.weights, whole, paths, pools)
    row, token = jnp.arange(batch)[:, None, None], jnp.arange(num_tokens)[:, None]
    seen = jnp.zeros((batch, num_tokens, count), bool)
    return seen.at[row, token, best].set(True, mode="drop")
