"""Attention over some of the slots, and the merge of such parts of one softmax.

Parts are weighted by their softmax sums ("flash decoding"; the rescaling is that of online softmax,
Milakov and Gimelshein, arXiv 1805.02867). They are slots that a device holds, or blocks of slots
that are read one after the other.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.reference import (
    MASKED,
    by_head,
    by_token,
    masked_scores,
    visible_slots,
)
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.products import weighted_sum_f32

SCORE_BYTES = 1 << 27  # limit for the scores that are in memory together
BLOCK, LONG = 256, 512  # slots that a CPU reads at a time, where a table has so many


class PartialAttention(NamedTuple):
    """Attention over some slots, in float32. The weight of a value is ``exp(score - peak)``."""

    weighted: Array  # [..., Q, D] sum of the weighted values
    peak: Array  # [..., Q] the largest score; very low if the query sees none of the slots
    total: Array  # [..., Q] sum of the weights


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("page_size", "options", "block"))
def partial_attention_reference(
    q: Array,  # [B, T, Q, D]
    pages: LayerPages,
    context: QueryContext,
    offset: Array | int,  # []
    *,
    page_size: int,
    options: AttentionOptions,
    block: int | None = None,
) -> PartialAttention:
    """See partial_attention.

    If there are scores of many slots, slots are read in blocks, up to the last that any query may
    see: memory for scores does not grow with the context.

    ``block``: slots that are read at a time, at least one page's; None: as fit SCORE_BYTES.
    """
    local_size, (batch, columns) = pages.k.shape[2], context.page_table.shape
    if block is None:
        block = SCORE_BYTES // (4 * math.prod(q.shape[:3]))
    kv_lens = jnp.minimum(context.ends, columns * page_size)
    context = context._replace(kv_lens=kv_lens)
    width = min(max(1, block // local_size), columns)  # columns of a block
    table = jnp.pad(context.page_table, ((0, 0), (0, -columns % width)))

    def attend(index: Array | int) -> PartialAttention:
        first = index * width
        part_of_table = lax.dynamic_slice(table, (0, first), (batch, width))
        slots = (first + jnp.arange(width)[:, None]) * page_size + offset + jnp.arange(local_size)
        seen = visible_slots(context, slots.reshape(-1), options)
        scores, v = masked_scores(q, pages, part_of_table, seen, options)
        peak = jnp.max(scores, axis=-1)
        exps = jnp.exp(scores - peak[..., None])
        return PartialAttention(weighted_sum_f32(exps.astype(v.dtype), v), peak, exps.sum(-1))

    found = in_blocks(attend, -(-jnp.max(kv_lens) // (width * page_size)), width < columns)
    per_query = (by_token(x[..., None], (*q.shape[:3], 1))[..., 0] for x in found[1:])
    weighted = by_head(found.weighted, pages.v_scale)
    return PartialAttention(by_token(weighted, q.shape), *per_query)


def is_long(page_table: Array, pages: Array) -> bool:
    """Whether attention over the slots of a table [B, M] is worth a loop."""
    return page_table.shape[1] * pages.shape[2] >= LONG


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames="options")
def attention_in_blocks(
    q: Array,  # [B, T, Q, D]
    pages: LayerPages,
    context: QueryContext,
    sinks: Array | None = None,  # [Q]
    *,
    options: AttentionOptions,
) -> Array:
    """Paged attention, a block of slots after the other up to the last that a query may see: it
    takes as long as the longest context, however wide the table is.

    See pallas_kernels.paged_attention.paged_attention. It has no gradient.
    """
    size = pages.k.shape[2]
    found = partial_attention_reference(
        q, pages, context, 0, page_size=size, options=options, block=max(BLOCK, size)
    )
    if sinks is not None:
        found = with_sinks(found, sinks)
    return (found.weighted / found.total[..., None]).astype(q.dtype)


def in_blocks(
    attend: Callable[[Array | int], PartialAttention], blocks: Array, several: bool
) -> PartialAttention:
    """Attention over the slots of all blocks, one after the other.

    Args:
      attend: index of a block -> attention over its slots.
      blocks: int32 [], their number; one if not ``several``.
    """
    found = attend(0)
    if several:
        found = lax.fori_loop(1, blocks, lambda i, before: _both(before, attend(i)), found)
    return found


def merge_partials(parts: PartialAttention) -> Array:
    """Attention over all slots, of stacked parts [n, ..., Q, D]: float32 [..., Q, D]."""
    weights = jnp.exp(parts.peak - jnp.max(parts.peak, axis=0))
    total = jnp.sum(parts.total * weights, axis=0)
    return jnp.sum(parts.weighted * weights[..., None], axis=0) / total[..., None]


def merge_normalized(parts: Array, log_sums: Array) -> tuple[Array, Array]:
    """Attention over all slots, float32 [..., D], and the log-sum-exps of its scores [...].

    ``parts`` [n, ..., D] are what attention to each part of the slots gives, and ``log_sums`` [n,
    ...] their log-sum-exps. It is one reduction, and so one launch on a GPU.
    """

    def both(first: Any, other: Any) -> Any:
        (x, x_log_sum), (y, y_log_sum) = first, other
        peak = jnp.maximum(x_log_sum, y_log_sum)
        x_weight, y_weight = jnp.exp(x_log_sum - peak), jnp.exp(y_log_sum - peak)
        total = x_weight + y_weight
        return (x * x_weight + y * y_weight) / total, peak + jnp.log(total)

    operands = parts, jnp.broadcast_to(log_sums[..., None], parts.shape)
    none = jnp.float32(0), jnp.float32(MASKED)
    merged, log_sum = lax.reduce(operands, none, both, (0,))
    return merged, log_sum[..., 0]


def with_sinks(part: PartialAttention, sinks: Array) -> PartialAttention:
    """The part with one more slot, whose value is zero and whose scores are ``sinks`` [Q]."""
    zeros, peaks = jnp.zeros_like(part.weighted), jnp.broadcast_to(sinks, part.peak.shape)
    return _both(
        part, PartialAttention(zeros, peaks.astype(jnp.float32), jnp.ones_like(part.total))
    )


def _both(first: PartialAttention, other: PartialAttention) -> PartialAttention:
    peak = jnp.maximum(first.peak, other.peak)
    weights = [jnp.exp(part.peak - peak) for part in (first, other)]
    return PartialAttention(
        weighted=first.weighted * weights[0][..., None] + other.weighted * weights[1][..., None],
        peak=peak,
        total=first.total * weights[0] + other.total * weights[1],
    )
