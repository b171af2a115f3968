"""Attention over some slots of every page, and the merge of such parts of one softmax.

Where each of several devices holds a part of every page, it attends to that. The parts are then
weighted by their softmax sums ("flash decoding"; the rescaling is that of online softmax, Milakov
and Gimelshein, arXiv 1805.02867).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.float8 import check_scales
from pallas_kernels.paged_attention import NO_OPTIONS, misfit, softcap_misfit
from pallas_kernels.paged_attention.reference import (
    by_head,
    by_token,
    masked_scores,
    visible_slots,
)
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.products import weighted_sum_f32
from pallas_kernels.selection import Implementation, kernel_module, wants_tpu

SCORE_BYTES = 1 << 27  # limit for the scores that are in memory together


class PartialAttention(NamedTuple):
    """Attention over some slots, in float32. The weight of a value is ``exp(score - peak)``."""

    weighted: Array  # [..., Q, D] sum of the weighted values
    peak: Array  # [..., Q] the largest score; very low if the query sees none of the slots
    total: Array  # [..., Q] sum of the weights


@jax.named_scope("attention")
def partial_attention(
    q: Array,
    pages: LayerPages,
    context: QueryContext,
    offset: Array | int,
    *,
    page_size: int,
    options: AttentionOptions = NO_OPTIONS,
    implementation: Implementation = "reference",
) -> PartialAttention:
    """Attend to the slots that these pages hold. Other arguments are those of paged_attention.

    There is no gradient.

    Args:
      pages: slots ``offset`` to ``offset + K - 1`` of every page.
      offset: int32 [].
      page_size: slots of a whole page.
      implementation: "auto" takes the Hopper kernel where it takes whole pages of K slots, else the
        reference. There is no TPU kernel.

    Returns float32 [B, T, Q, D] and [B, T, Q].

    Raises ValueError if ``implementation`` is "mosaic_gpu" or "mosaic_tpu" and there is no kernel
    that can take the arguments.
    """
    check_scales(*pages)
    problem = misfit(q, pages.k, pages.v, order_invariant=False) or softcap_misfit(options.softcap)
    if wants_tpu(implementation):
        problem = "parts of pages: the TPU kernel attends to whole ones"
    mosaic = kernel_module("paged_attention", implementation, problem)
    function = partial_attention_reference if mosaic is None else mosaic.partial_attention_mosaic
    return function(q, pages, context, offset, page_size=page_size, options=options)


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
