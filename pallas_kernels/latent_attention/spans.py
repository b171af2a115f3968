"""Entries that stand for spans of consecutive tokens, in jnp.

A sequence's positions from its first on are cut into spans of N. A whole span has an entry: the sum
of values of its tokens, channel by channel, weighted by a softmax of the tokens' gates. Where spans
overlap, an entry is made of the span before, too: each token has two values and two gates, the
first ones for the span after its own, the last ones for its own.

In memory each token has its values and its gates side by side. The last token of a span has the
entry in place of its last value, which nothing else reads. The entry is made of the tokens of that
token's own path. So every node of a tree that ends a span has the entry of its branch, which its
descendants find on their paths, and which moves with the node when it is accepted: nothing is
taken back.

An entry may be the mean of its tokens' values, too. Then there are no gates, and the entry is in
place of the last token's value.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.latent_attention.chosen import BLOCK_BYTES, in_blocks
from pallas_kernels.latent_attention.pools import Paths, may_end, slots_in_pages
from pallas_kernels.paged_attention.reference import MASKED
from pallas_kernels.pages import QueryContext
from pallas_kernels.rope_kv_write.reference import read_rows, write_rows


class Spans(NamedTuple):
    """How entries of D numbers are made.

    Attributes:
      places: [N, D], with overlaps [N, 2 * D]: what is added to a gate by its token's place in the
        span.
      finish: from sums [B, n, D] and int positions [B, n], of the first token of each span, to the
        entries [B, n, D].
      overlapping: whether the span before counts, too.
    """

    places: Array
    finish: Callable[[Array, Array], Array]
    overlapping: bool

    @property
    def size(self) -> int:
        """N, the tokens of a span."""
        return len(self.places)

    @property
    def width(self) -> int:
        """D"""
        return self.places.shape[1] // (2 if self.overlapping else 1)

    @property
    def members(self) -> int:
        """The tokens that an entry is made of."""
        return self.size * (2 if self.overlapping else 1)

    @property
    def columns(self) -> tuple[int, int]:
        """Where an entry is in what is kept of the last token of its span."""
        return self.places.shape[1] - self.width, self.places.shape[1]

    def sums(self, kept: Array, present: Array) -> Array:
        """Sums [..., D] of what is kept of the members of spans [..., members, 2 * places], of
        which some may not be ``present``: bool [..., members]."""
        values, gates = jnp.split(kept.astype(jnp.float32), 2, axis=-1)
        places = self.places.astype(jnp.float32)
        if self.overlapping:
            values, gates = self._halves(values), self._halves(gates)
            places = jnp.concatenate(jnp.split(places, 2, axis=-1), axis=-2)
        seen = present[..., None]
        weights = jax.nn.softmax(jnp.where(seen, gates + places, MASKED), axis=-2)
        summed = jnp.sum(weights * jnp.where(seen, values, 0), axis=-2)
        return summed.astype(kept.dtype)

    def _halves(self, x: Array) -> Array:
        """The first numbers of the tokens before a span, and the last ones of its own: [...,
        members, D] of [..., members, 2 * D]."""
        before, inside = jnp.split(x, 2, axis=-2)
        return jnp.concatenate([before[..., : self.width], inside[..., self.width :]], axis=-2)


class SpanMeans(NamedTuple):
    """How entries of D numbers are made that are means of what is kept of their tokens.

    Attributes:
      size: N, the tokens of a span.
      width: D.
      finish: as of Spans.
    """

    size: int
    width: int
    finish: Callable[[Array, Array], Array]

    @property
    def members(self) -> int:
        """The tokens that an entry is made of."""
        return self.size

    @property
    def overlapping(self) -> bool:
        """Whether the span before counts, too."""
        return False

    @property
    def columns(self) -> tuple[int, int]:
        """Where an entry is in what is kept of the last token of its span."""
        return 0, self.width

    def sums(self, kept: Array, present: Array) -> Array:
        """Means [..., D] of what is kept of the members of spans [..., N, D], all of which are
        ``present``."""
        return jnp.mean(kept.astype(jnp.float32), axis=-2).astype(kept.dtype)


def write_spans(
    pages: Array,
    rows: Array,
    slots: Array,
    spans: Spans | SpanMeans,
    context: QueryContext,
    first_slot: int = 0,
    block: int | None = None,
) -> Array:
    """Write what is kept of T tokens of each sequence, and the entries of the spans that they end.

    Args:
      pages: [P, 1, K, 2 * places], for means [P, 1, K, D].
      rows: [B, T, 1, 2 * places], values and gates side by side; for means [B, T, 1, D].
      slots: [B, T] they are written to; 0: the null page's.
      context: of the tokens; its page table leads to the tokens before them.
      first_slot: where the first span begins.
      block: tokens whose entries are made at a time; None: as fit BLOCK_BYTES.
    """
    pages, size = write_rows(pages, rows, slots), spans.size
    paths, slots = may_end(slots, context, size, first_slot)
    first, stop = spans.columns

    def with_entries(last: Array, *nodes: Array) -> Array:
        """What is kept of the last tokens of spans [B, n, 2 * places], with the entries."""
        of_block = Paths(last, paths.context_lens, nodes[0] if nodes else None)
        members = last[..., None] + jnp.arange(1 - spans.members, 1)  # [B, n, members]
        where = slots_in_pages(context, of_block.slots(members), pages.shape[2])
        kept = read_rows(pages, where.reshape(len(where), -1))
        kept = kept.reshape(*where.shape, -1)
        sums = spans.sums(kept, members >= first_slot)
        entries = spans.finish(sums, last - first_slot + 1 - size)
        return kept[..., -1, :].at[..., first:stop].set(entries.astype(kept.dtype))

    places = paths.last - first_slot
    is_end = (places % size == size - 1) & (places >= size - 1)
    if block is None:  # a tree's nodes may all end spans: which do is not known here
        block = BLOCK_BYTES // (4 * len(slots) * spans.members * rows.shape[-1])
    arrays = [paths.last] + ([] if paths.nodes is None else [paths.nodes])
    last = in_blocks(with_entries, arrays, block)
    return write_rows(pages, last[:, :, None], jnp.where(is_end, slots, 0))


def entries_of_whole(rows: Array, spans: Spans | SpanMeans) -> Array:
    """The entries [B, n, D] of the spans of whole sequences: rows [B, T, 1, 2 * places], for means
    [B, T, 1, D]."""
    batch, num_tokens, _, width = rows.shape
    size, count = spans.size, num_tokens // spans.size
    inside = rows[:, : count * size].reshape(batch, count, size, width)
    present = jnp.ones((count, size), bool)
    if spans.overlapping:
        before = jnp.roll(inside, 1, axis=1)
        inside = jnp.concatenate([before, inside], axis=2)
        has_before = jnp.broadcast_to(jnp.arange(count)[:, None] > 0, (count, size))
        present = jnp.concatenate([has_before, present], axis=1)
    starts = jnp.broadcast_to(size * jnp.arange(count), (batch, count))
    return spans.finish(spans.sums(inside, present[None]), starts)
