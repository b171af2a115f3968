"""Attention of a few query tokens over a paged KV cache, under a tree mask."""

import functools
import math
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.float8 import check_scales, is_float8
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.paged_attention.parts import attention_in_blocks, is_long
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tuning import ROWS
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.selection import Implementation, kernel_module, wants_tpu

# Rows of a tile of a TPU's memory, by dtype.
TPU_TILES = MappingProxyType({jnp.dtype("bfloat16"): 16, jnp.dtype("float32"): 8})
TPU_PAGE_BYTES = 1 << 20  # most that a page of all KV heads may have
TPU_TABLE = 1 << 17  # most entries of a page table
NO_OPTIONS = AttentionOptions()


@jax.named_scope("attention")
def paged_attention(
    q: Array,
    pages: LayerPages,
    context: QueryContext,
    sinks: Array | None = None,
    *,
    options: AttentionOptions = NO_OPTIONS,
    order_invariant: bool = False,
    implementation: Implementation = "reference",
) -> Array:
    """Attend from T query tokens per sequence to its committed context and its own tree nodes.

    Query ``t`` sees the committed slots ``first_slot <= s < context_lens``. Past them it sees slot
    ``context_lens + j`` if bit ``j`` of its ``ancestors`` row is set. With ``ancestors`` None it
    sees those with ``j <= t`` (causal: the T queries are the next T tokens).

    Slots that no query sees may hold NaN or infinity: slots from ``kv_lens`` on, slots before
    ``first_slot`` or left of every query's window, the null page, and pages of no sequence. Slots
    that some query of a sequence sees must be finite, and so must all slots between its context and
    ``kv_lens``.

    Args:
      q: [B, T, Q, D]. Query heads ``g * Q / G`` to ``(g + 1) * Q / G - 1`` share KV head ``g``.
      pages: of the layer; they already hold the queries' own keys and values.
      sinks: float32 [Q], for each query head the score of one more slot, whose value is zero
        (Xiao et al., arXiv 2309.17453; learned scores as in gpt-oss). Of the kernels the Hopper
        one takes them: XLA adds the slot to what it gives.
      order_invariant: accumulate in float64, so that the rounded result does not depend on which
        slots hold the visible keys, nor on the width of the page table (in float32 on a CPU it
        may in the last bit, where exp does). Slower.
      implementation: "auto" takes the Hopper kernel where it fits (bfloat16, or
        bytes with bfloat16 queries, heads of 64, 128 or 256, pages of 8 to 128 slots), "auto_tpu"
        the TPU kernel (see ``misfit_tpu``), else the reference.

    Returns [B, T, Q, D] in q's dtype. Queries that see no slot return a finite value.

    Raises ValueError for shapes that do not match, for pages of bytes without scales, and if
    ``implementation`` is "mosaic_gpu" or "mosaic_tpu" and the kernel cannot take the arguments.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    _, kv_heads, _, page_head_dim = pages.k.shape
    if pages.k.shape != pages.v.shape or page_head_dim != head_dim or num_heads % kv_heads:
        raise ValueError(
            f"queries {q.shape} do not fit pages {pages.k.shape} (keys), {pages.v.shape} (values)"
        )
    context.check(batch, num_tokens)
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks must be {q.shape[2:3]}, got {sinks.shape}")
    check_scales(*pages)
    reference = functools.partial(
        paged_attention_reference, options=options, order_invariant=order_invariant
    )
    if wants_tpu(implementation):
        problem = misfit_tpu(q, pages.k, pages.v, context.page_table, order_invariant)
        problem = problem or softcap_misfit_tpu(options.softcap)
        if sinks is not None:
            problem = "attention sinks: leave out the operation paged_attention"
    else:
        problem = misfit(q, pages.k, pages.v, order_invariant)
    problem = problem or chunk_misfit(options)
    mosaic = kernel_module("paged_attention", implementation, problem)
    if mosaic is None and is_long(context.page_table, pages.k) and not order_invariant:
        blocks = functools.partial(attention_in_blocks, options=options)
        function = functools.partial(lax.platform_dependent, cpu=blocks, default=reference)
        return with_reference_gradient(function, reference)(q, pages, context, sinks)
    if mosaic is None:
        return reference(q, pages, context, sinks)
    kernel = functools.partial(mosaic.paged_attention_mosaic, options=options)
    given = () if sinks is None else (sinks,)
    return with_reference_gradient(kernel, reference)(q, pages, context, *given)


def misfit(q: Array, k_pages: Array, v_pages: Array, order_invariant: bool) -> str | None:
    """Why the Hopper kernel cannot take these arguments, None if it can."""
    page_size, head_dim = k_pages.shape[2:]
    group = q.shape[2] // k_pages.shape[1]
    if order_invariant:
        return "sums that do not depend on the order of slots"
    takes = k_pages.dtype == jnp.bfloat16 or is_float8(k_pages)
    if q.dtype != jnp.bfloat16 or k_pages.dtype != v_pages.dtype or not takes:
        return (
            f"{q.dtype} queries, {k_pages.dtype} and {v_pages.dtype} pages: all must be bfloat16, "
            "or pages bytes"
        )
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}: they must be 64, 128 or 256 wide"
    if page_size not in (8, 16, 32, 64, 128):
        return f"pages of {page_size} slots: they must have 8, 16, 32, 64 or 128"
    if group > ROWS or group * head_dim < 128:
        return f"{group} query heads of {head_dim} to a KV head"
    return None


def softcap_misfit_tpu(softcap: float | None) -> str | None:
    """Why the TPU kernel cannot compute capped scores, None without a cap."""
    return None if softcap is None else f"scores with a soft cap of {softcap}"


def chunk_misfit(options: AttentionOptions) -> str | None:
    """Why no kernel can attend inside of chunks, None without these."""
    return None if options.chunk is None else f"attention in chunks of {options.chunk} positions"


def misfit_tpu(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, order_invariant: bool
) -> str | None:
    """Why the TPU kernel cannot take these arguments, None if it can.

    Pages are copied whole, so they must consist of whole tiles: 16 rows in bfloat16, 8 in float32.
    Two pages of keys and two of values must fit in VMEM, and the page table in SMEM.
    """
    page_size, head_dim = k_pages.shape[2:]
    if order_invariant:
        return "sums that do not depend on the order of slots"
    if not q.dtype == k_pages.dtype == v_pages.dtype or q.dtype not in TPU_TILES:
        return (
            f"{q.dtype} queries, {k_pages.dtype} and {v_pages.dtype} pages: all must be bfloat16, "
            "or all float32"
        )
    if head_dim % 64:
        return f"heads of {head_dim}: their width must be a multiple of 64"
    if page_size % TPU_TILES[q.dtype]:
        return f"pages of {page_size} slots: a multiple of {TPU_TILES[q.dtype]} is needed"
    page_bytes = math.prod(k_pages.shape[1:]) * k_pages.dtype.itemsize
    if page_bytes > TPU_PAGE_BYTES:
        return f"pages of {page_bytes} bytes: at most {TPU_PAGE_BYTES}"
    if page_table.size > TPU_TABLE:
        return f"page tables of {page_table.shape}: at most {TPU_TABLE} entries"
    return None
