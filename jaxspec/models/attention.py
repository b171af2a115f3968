"""How a forward pass's tokens see the past: paged, or dense for training and for references."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import LayerCache
from jaxspec.models.layers import Heads
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_kv_write import rope_kv_write


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """An Attend over paged caches: writes the T tokens' keys and values, then attends.

    Attributes:
      page_table: [B, M] pages of each sequence.
      context_lens: [B] committed slots.
      slots: [B, T] where the tokens' own keys and values go (0: the null page).
      positions: [B, T] the tokens' positions in slots, for sliding windows.
      ancestors: [B, T, words] tree mask past the context, or None for causal.
      first_slot, num_nodes, order_invariant: see paged_attention.
    """

    page_table: Array
    context_lens: Array
    slots: Array
    positions: Array
    ancestors: Array | None = None
    first_slot: int = 0
    num_nodes: int | None = None
    order_invariant: bool = False

    def __call__(
        self, cache: LayerCache, heads: Heads, window: int | None
    ) -> tuple[Array, LayerCache]:
        q, k_pages, v_pages = rope_kv_write(
            heads.parts,
            heads.rope,
            heads.q_norm,
            heads.k_norm,
            cache.k,
            cache.v,
            self.slots,
            eps=heads.eps,
        )
        out = paged_attention(
            q,
            k_pages,
            v_pages,
            self.page_table,
            self.context_lens,
            self.positions,
            self.ancestors,
            window=window,
            first_slot=self.first_slot,
            num_nodes=self.num_nodes,
            order_invariant=self.order_invariant,
        )
        return out, LayerCache(k=k_pages, v=v_pages)


def dense_causal_attend(
    cache: None, heads: Heads, window: int | None, implementation: Literal["xla", "cudnn"] = "xla"
) -> tuple[Array, None]:
    """An Attend over the T tokens themselves, without a cache."""
    return dense_causal_attention(*heads.rotated(), window, implementation), cache


def dense_causal_attention(
    q: Array,
    k: Array,
    v: Array,
    window: int | None = None,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> Array:
    """Causal attention: q [B, T, Q, D], k and v [B, T, G, D] -> [B, T, Q, D].

    ``cudnn`` is a flash kernel for bfloat16 on NVIDIA GPUs: it never writes the [T, T] scores.
    """
    local = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=local, implementation=implementation
    )
    return jnp.asarray(out)
