"""Attention of a few query tokens over a paged cache of latents, under a tree mask.

Of each token one vector is kept, of which keys and values of all heads are projections (multi-head
latent attention, arXiv 2405.04434). Queries that were projected to the space of these vectors
attend to them as they are: a vector is the key of all heads, and its first entries, the latent,
are the value.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.latent_attention.tuning import MOST_STORED
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.selection import Implementation, kernel_module, wants_tpu


@jax.named_scope("attention")
def latent_attention(
    q: Array,
    pages: Array,
    context: QueryContext,
    *,
    latent: int,
    scale: float,
    first_slot: int = 0,
    order_invariant: bool = False,
    implementation: Implementation = "reference",
) -> Array:
    """Attend from T query tokens per sequence to its committed context and its own tree nodes.

    What queries see, and where slots may hold NaN, is told in paged_attention.

    Args:
      q: [B, T, Q, L + R]
      pages: [P, 1, K, L + R]; they already hold the queries' own vectors.
      context: as of paged_attention.
      latent: L, the leading entries of a vector that are its value.
      scale: of the scores.
      first_slot, order_invariant: as of paged_attention.
      implementation: "auto" takes the Hopper kernel where it fits (bfloat16, up to 576 entries of
        which up to 512 are the latent, a multiple of 8 heads, pages of 8 to 128 slots), "auto_tpu"
        the TPU kernel of paged_attention, else the reference.

    Returns [B, T, Q, L] in q's dtype. Queries that see no slot return a finite value.

    Raises ValueError for shapes that do not match, and if ``implementation`` is "mosaic_gpu" or
    "mosaic_tpu" and the kernel cannot take the arguments.
    """
    batch, num_tokens, _, stored = q.shape
    if pages.shape[1] != 1 or pages.shape[3] != stored or not 0 < latent <= stored:
        raise ValueError(
            f"queries {q.shape} and latents of {latent} do not fit pages {pages.shape}"
        )
    context.check(batch, num_tokens)
    how = {"latent": latent, "scale": scale, "first_slot": first_slot}
    problem = misfit(q, pages, latent, order_invariant)
    mosaic = None
    if not wants_tpu(implementation):
        mosaic = kernel_module("latent_attention", implementation, problem)
    if mosaic is None:
        return paged_attention(
            q,
            LayerPages(pages, pages),
            context,
            options=AttentionOptions(scale=scale, first_slot=first_slot),
            order_invariant=order_invariant,
            implementation=implementation if wants_tpu(implementation) else "reference",
        )[..., :latent]
    reference = functools.partial(
        latent_attention_reference, order_invariant=order_invariant, **how
    )
    kernel = functools.partial(mosaic.latent_attention_mosaic, **how)
    return with_reference_gradient(kernel, reference)(q, pages, context)


@jax.named_scope("attention")
def latent_attention_with_sinks(
    q: Array,
    pages: Array,
    context: QueryContext,
    sinks: Array,
    *,
    latent: int,
    options: AttentionOptions,
    order_invariant: bool = False,
) -> Array:
    """``latent_attention`` with one more score of each head, of a value of zero: float32 [Q]. No
    kernel takes it. ``options``: the scale of the scores, and the first slot."""
    how: Any = {"options": options, "order_invariant": order_invariant}
    return paged_attention(q, LayerPages(pages, pages), context, sinks, **how)[..., :latent]


def misfit(q: Array, pages: Array, latent: int, order_invariant: bool) -> str | None:
    """Why the Hopper kernel cannot take these arguments, None if it can."""
    num_heads, stored = q.shape[2:]
    page_size = pages.shape[2]
    if order_invariant:
        return "sums that do not depend on the order of slots"
    if not q.dtype == pages.dtype == jnp.bfloat16:
        return f"{q.dtype} queries and {pages.dtype} pages: both must be bfloat16"
    if latent % 128 or not latent <= 512 or stored % 64 or stored > MOST_STORED:
        return (
            f"vectors of {stored} entries with latents of {latent}: they must be multiples of 64 "
            f"and 128, at most {MOST_STORED} and 512"
        )
    if page_size not in (8, 16, 32, 64, 128):
        return f"pages of {page_size} slots: they must have 8, 16, 32, 64 or 128"
    if num_heads % 8:
        return f"{num_heads} heads: their number must be a multiple of 8"
    return None
