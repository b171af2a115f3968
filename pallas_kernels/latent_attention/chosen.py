"""Latent attention to some positions of each query, which an indexer chooses, in jnp.

The indexer scores all slots that a query sees. The best are gathered for each query by itself, so
the rest costs no more than as many slots, however long a sequence is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.reference import (
    MASKED,
    gather_pages,
    scaled_scores_f64,
    softmax_times_values,
    visible_slots,
)
from pallas_kernels.pages import AttentionOptions, QueryContext
from pallas_kernels.products import einsum_f32, scores_f32, weighted_sum_f32

BLOCK_BYTES = 1 << 28  # limit for what is computed of the queries that are in memory together


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("top_k", "first_slot", "order_invariant", "block"))
@jax.named_scope("indexer")
def choose_slots(
    q: Array,
    weights: Array,
    pages: Array,
    context: QueryContext,
    *,
    top_k: int,
    first_slot: int = 0,
    order_invariant: bool = False,
    block: int | None = None,
) -> Array:
    """The slots that T queries of each sequence attend to: the best of those that they see.

    What queries see, and where slots may hold NaN, is told in paged_attention.

    Args:
      q: [B, T, I, D] queries of the indexer's I heads.
      weights: float32 [B, T, I] of its heads: see best_slots.
      pages: [P, 1, K, D], the indexer's keys; they already hold the queries' own.
      top_k: how many of a sequence's slots are chosen, less than there are.
      first_slot, order_invariant: as of paged_attention.
      block: tokens that are read at a time; None: as fit BLOCK_BYTES.

    Returns int32 [B, T, top_k]: positions in the sequence in ascending order, then the number of
    its slots where a query sees fewer.
    """
    slots = jnp.arange(context.page_table.shape[1] * pages.shape[2])
    seen = visible_slots(context, slots, AttentionOptions(first_slot=first_slot))
    keys = gather_pages(pages, context.page_table)[:, 0]
    return best_slots(q, weights, keys, seen, top_k, order_invariant, block)


def best_slots(
    q: Array,  # [B, T, I, D]
    weights: Array,  # float32 [B, T, I]
    keys: Array,  # [B, S, D]
    seen: Array,  # bool [B, T, S]
    top_k: int,
    order_invariant: bool = False,
    block: int | None = None,
) -> Array:
    """The ``top_k`` slots with the largest scores, of those that a query sees: int32 [B, T, top_k]
    in ascending order, S where it sees fewer.

    A score is the sum over heads of weight times relu(q . k), in float32. Of equal scores, as those
    of which no product is above 0, the lower slot is the better one. ``order_invariant``: sums are
    in float64, and rounded. ``block``: as of choose_slots.
    """
    num_slots = keys.shape[1]
    if block is None:
        block = BLOCK_BYTES // (4 * len(q) * q.shape[2] * num_slots)

    def chosen(q: Array, weights: Array, seen: Array) -> Array:
        return best_of(index_scores(q, weights, keys, order_invariant), seen, top_k)

    return in_blocks(chosen, (q, weights, seen), block)


def index_scores(q: Array, weights: Array, keys: Array, order_invariant: bool) -> Array:
    """The scores [B, T, S] of best_slots, of its arguments."""
    if order_invariant:
        scores = _scores_f64(q, weights, keys)
    else:
        products = jax.nn.relu(einsum_f32("bthd,bsd->bths", q, keys))
        scores = weighted_sum_f32(weights[:, :, None], products)[:, :, 0]
    return jnp.where(scores == 0, 0, scores)  # -0 is not less than 0


def best_of(scores: Array, seen: Array, count: int) -> Array:
    """The places of the ``count`` largest of scores [B, T, S] that are ``seen``: int32 [B, T,
    count] in ascending order, S where fewer are."""
    best, places = lax.top_k(jnp.where(seen, scores, -jnp.inf), count)
    return jnp.sort(jnp.where(best > -jnp.inf, places, scores.shape[-1]), axis=-1)


class ChosenOptions(NamedTuple):
    """What shapes a program of chosen_attention: a static argument.

    Attributes:
      latent: L, the leading entries of a vector that are its value.
      scale: of the scores.
      order_invariant: sums over slots are in float64, see paged_attention.
      block: tokens that are read at a time; None: as fit BLOCK_BYTES.
    """

    latent: int
    scale: float
    order_invariant: bool = False
    block: int | None = None


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("options",))
@jax.named_scope("attention")
def chosen_attention(
    q: Array,
    pages: Array,
    page_table: Array,
    chosen: Array,
    sinks: Array | None = None,
    *,
    options: ChosenOptions,
) -> Array:
    """Attend from T queries of each sequence to the slots that were chosen for them.

    Args:
      q: [B, T, Q, L + R] queries in the space of what is stored.
      pages: [P, 1, K, L + R]; they already hold the queries' own vectors.
      page_table: int32 [B, M].
      chosen: int32 [B, T, k], a result of choose_slots.
      sinks: float32 [Q], one more score of each head, of a value of zero; None: there are none.

    Returns [B, T, Q, L] in q's dtype. Queries of which no slot was chosen return a finite value.
    """
    batch, _, num_heads, stored = q.shape
    page_size, count, block = pages.shape[2], chosen.shape[-1], options.block
    if block is None:
        block = BLOCK_BYTES // (batch * count * (stored * q.dtype.itemsize + 4 * num_heads))
    vectors = pages.reshape(-1, stored)

    def attend(q: Array, chosen: Array) -> Array:
        is_slot = chosen < page_table.shape[1] * page_size  # [B, T, k]
        position = jnp.where(is_slot, chosen, 0)
        columns = (position // page_size).reshape(batch, -1)
        page = jnp.take_along_axis(page_table, columns, axis=1).reshape(chosen.shape)
        rows = vectors.at[page * page_size + position % page_size].get(mode="promise_in_bounds")
        rows = jnp.where(is_slot[..., None], rows, 0)  # [B, T, k, L + R]; 0 x NaN is NaN
        if options.order_invariant:
            scores = scaled_scores_f64(q, rows, options.scale)
        else:
            scores = scores_f32(q, rows) * options.scale
        scores = jnp.where(is_slot[:, :, None], scores, MASKED)  # [B, T, Q, k]
        sunk = None if sinks is None else sinks.astype(jnp.float32)[None, :, None]
        latents = rows[..., : options.latent]
        out = softmax_times_values(scores, latents, options.order_invariant, sunk)
        return out.astype(q.dtype)

    return in_blocks(attend, (q, chosen), block)


def _scores_f64(q: Array, weights: Array, keys: Array) -> Array:
    """The scores of best_slots, rounded to float32 [B, T, S] from float64."""
    with jax.enable_x64(True):
        q, weights, keys = (x.astype(jnp.float64) for x in (q, weights, keys))
        products = jax.nn.relu(jnp.einsum("bthd,bsd->bths", q, keys))
        return jnp.einsum("bth,bths->bts", weights, products).astype(jnp.float32)


def in_blocks(function: Callable[..., Array], arrays: Sequence[Array], block: int) -> Array:
    """A function of arrays [B, T, ...] that treats each of the T tokens alike, a block of tokens
    after the other; at least a token at a time."""
    batch, num_tokens = arrays[0].shape[:2]
    block = max(block, 1)
    if block >= num_tokens:
        return function(*arrays)

    def split(x: Array) -> Array:
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, -num_tokens % block)
        padded = jnp.pad(x, padding)
        return padded.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1)

    found = lax.map(lambda parts: function(*parts), tuple(map(split, arrays)))
    return found.swapaxes(0, 1).reshape(batch, -1, *found.shape[3:])[:, :num_tokens]
