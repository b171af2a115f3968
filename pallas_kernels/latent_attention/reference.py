"""The specification of latent attention: paged attention of which the leading entries are kept."""

from jax import Array

from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext


def latent_attention_reference(
    q: Array,  # [B, T, Q, L + R]
    pages: Array,  # [P, 1, K, L + R]
    context: QueryContext,
    *,
    latent: int,
    scale: float,
    first_slot: int = 0,
    order_invariant: bool = False,
) -> Array:
    """See pallas_kernels.latent_attention.latent_attention."""
    attended = paged_attention_reference(
        q,
        LayerPages(pages, pages),
        context,
        options=AttentionOptions(scale=scale, first_slot=first_slot),
        order_invariant=order_invariant,
    )
    return attended[..., :latent]
