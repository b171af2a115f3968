"""Attention of a few query tokens over a paged KV cache, under a tree mask."""

import functools
import math
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import check_scales, is_float8
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tuning import ROWS
from pallas_kernels.selection import Implementation, kernel_module, wants_tpu

# Rows of a tile of a TPU's memory, by dtype.
TPU_TILES = MappingProxyType({jnp.dtype("bfloat16"): 16, jnp.dtype("float32"): 8})
TPU_PAGE_BYTES = 1 << 20  # most that a page of all KV heads may have
TPU_TABLE = 1 << 17  # most entries of a page table


@jax.named_scope("attention")
def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    context_lens: Array,
    positions: Array,
    ancestors: Array | None = None,
    kv_lens: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    first_slot: int = 0,
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
      k_pages, v_pages: [P, G, K, D]; they already hold the queries' own keys and values.
      page_table: [B, M] int32, the pages of each sequence, in order.
      context_lens: [B] int32, committed slots of each sequence.
      positions: [B, T] int32, the position of each query counted in slots; only used by ``window``.
      ancestors: [B, T, words] uint32 bit mask over the slots past the context, or None.
      window: attend only to the latest ``window`` positions, the query's own included. Tree slots
        are always visible under the mask: the caller must keep trees shallower than the window.
      scale: of the scores; None: 1 / sqrt(D).
      softcap: scores x, scaled, become ``softcap * tanh(x / softcap)``; None: they stay.
      kv_lens: [B] int32, end of each sequence's slots. No query of sequence ``b`` sees a slot from
        ``kv_lens[b]`` on, whatever the mask says. None: ``context_lens`` plus T for causal queries,
        or plus the number of mask bits.
      k_scale, v_scale: float32 [G], for pages of bytes (see float8.py): the bytes' numbers times
        the scale are the keys and values; else None.
      sinks: float32 [Q], for each query head the score of one more slot, whose value is zero
        (Xiao et al., arXiv 2309.17453; learned scores as in gpt-oss). No kernel takes them.
      first_slot: slots before it are hidden.
      order_invariant: accumulate in float64, so that the rounded result does not depend on which
        slots hold the visible keys, nor on the width of the page table (in float32 on a CPU it
        may in the last bit, where exp does). Slower.
      implementation: "auto" takes the Hopper kernel where it fits (bfloat16, or
        bytes with bfloat16 queries, heads of 64 or 128, pages of 8 to 128 slots), "auto_tpu"
        the TPU kernel (see ``misfit_tpu``), else the reference.

    Returns [B, T, Q, D] in q's dtype. Queries that see no slot return a finite value.

    Raises ValueError for shapes that do not match, for pages of bytes without scales, and if
    ``implementation`` is "mosaic_gpu" or "mosaic_tpu" and the kernel cannot take the arguments.
    """
    if kv_lens is None:
        kv_lens = context_lens + (q.shape[1] if ancestors is None else 32 * ancestors.shape[2])
    arguments = (q, k_pages, v_pages, page_table, context_lens, positions, ancestors, kv_lens)
    _check_shapes(*arguments)
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks must be {q.shape[2:3]}, got {sinks.shape}")
    check_scales(k_pages, v_pages, k_scale, v_scale)
    if k_scale is not None:
        arguments = (*arguments, k_scale, v_scale)
    reference = functools.partial(
        paged_attention_reference,
        window=window,
        scale=scale,
        softcap=softcap,
        first_slot=first_slot,
        order_invariant=order_invariant,
    )
    if sinks is not None:
        problem = "attention sinks: leave out the operation paged_attention"
    elif wants_tpu(implementation):
        problem = misfit_tpu(q, k_pages, v_pages, page_table, order_invariant)
    else:
        problem = misfit(q, k_pages, v_pages, order_invariant)
    problem = problem or softcap_misfit(softcap)
    mosaic = kernel_module("paged_attention", implementation, problem)
    if mosaic is None:
        return reference(*arguments, sinks=sinks)
    kernel = functools.partial(
        mosaic.paged_attention_mosaic, window=window, first_slot=first_slot, scale=scale
    )
    return with_reference_gradient(kernel, reference)(*arguments)


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
    if head_dim not in (64, 128):
        return f"heads of {head_dim}: they must be 64 or 128 wide"
    if page_size not in (8, 16, 32, 64, 128):
        return f"pages of {page_size} slots: they must have 8, 16, 32, 64 or 128"
    if group > ROWS or group * head_dim < 128:
        return f"{group} query heads of {head_dim} to a KV head"
    return None


def softcap_misfit(softcap: float | None) -> str | None:
    """Why no kernel can compute capped scores, None without a cap."""
    return None if softcap is None else f"scores with a soft cap of {softcap}"


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


def _check_shapes(q, k_pages, v_pages, page_table, context_lens, positions, ancestors, kv_lens):
    batch, num_tokens, num_heads, head_dim = q.shape
    _, kv_heads, _, page_head_dim = k_pages.shape
    if k_pages.shape != v_pages.shape or page_head_dim != head_dim or num_heads % kv_heads:
        raise ValueError(
            f"queries {q.shape} do not fit pages {k_pages.shape} (keys), {v_pages.shape} (values)"
        )
    if page_table.shape[0] != batch or not context_lens.shape == kv_lens.shape == (batch,):
        raise ValueError(
            f"page table {page_table.shape}, context lengths {context_lens.shape} and kv_lens "
            f"{kv_lens.shape} do not fit a batch of {batch}"
        )
    if positions.shape != (batch, num_tokens):
        raise ValueError(f"positions must be {(batch, num_tokens)}, got {positions.shape}")
    if ancestors is not None and ancestors.shape[:2] != (batch, num_tokens):
        raise ValueError(f"ancestors must start with {(batch, num_tokens)}: {ancestors.shape}")
