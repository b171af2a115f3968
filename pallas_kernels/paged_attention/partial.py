"""Attention over some slots of every page, where each of several devices holds a part of it."""

import jax
from jax import Array

from pallas_kernels.float8 import check_scales
from pallas_kernels.paged_attention import NO_OPTIONS, chunk_misfit, misfit
from pallas_kernels.paged_attention.parts import PartialAttention, partial_attention_reference
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.selection import Implementation, kernel_module, wants_tpu


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
    problem = misfit(q, pages.k, pages.v, order_invariant=False) or chunk_misfit(options)
    if wants_tpu(implementation):
        problem = "parts of pages: the TPU kernel attends to whole ones"
    mosaic = kernel_module("paged_attention", implementation, problem)
    function = partial_attention_reference if mosaic is None else mosaic.partial_attention_mosaic
    return function(q, pages, context, offset, page_size=page_size, options=options)
