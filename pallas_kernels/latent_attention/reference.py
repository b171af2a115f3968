"""The specification of latent attention: paged attention of which the leading entries are kept."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.reference import paged_attention_reference


def latent_attention_reference(
    q: Array,  # [B, T, Q, L + R]
    pages: Array,  # [P, 1, K, L + R]
    page_table: Array,  # [B, M]
    context_lens: Array,  # [B]
    ancestors: Array | None,  # [B, T, words]
    kv_lens: Array,  # [B]
    *,
    latent: int,
    scale: float,
    first_slot: int = 0,
    order_invariant: bool = False,
) -> Array:
    """See pallas_kernels.latent_attention.latent_attention."""
    positions = context_lens[:, None] + jnp.arange(q.shape[1])  # only windows use them
    attended = paged_attention_reference(
        q,
        pages,
        pages,
        page_table,
        context_lens,
        positions,
        ancestors,
        kv_lens,
        window=None,
        scale=scale,
        first_slot=first_slot,
        order_invariant=order_invariant,
    )
    return attended[..., :latent]
