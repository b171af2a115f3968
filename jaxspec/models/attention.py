"""How a forward pass's tokens see the past: paged, or dense for training and for references."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import LayerCache, write
from pallas_kernels.paged_attention import paged_attention


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """An Attend over paged caches: writes the T tokens' keys and values, then attends.

    Attributes:
      page_table: [B, M] pages of each sequence.
      context_lens: [B] committed slots.
      slots: [B, T] where the tokens' own keys and values go (0: the null page).
      positions: [B, T] the tokens' positions in slots, for sliding windows.
      ancestors: [B, T, words] tree mask past the context, or None for causal.
      first_slot, order_invariant: see paged_attention.
    """

    page_table: Array
    context_lens: Array
    slots: Array
    positions: Array
    ancestors: Array | None = None
    first_slot: int = 0
    order_invariant: bool = False

    def __call__(
        self, cache: LayerCache, q: Array, k: Array, v: Array, window: int | None
    ) -> tuple[Array, LayerCache]:
        with jax.named_scope("kv_write"):
            cache = write(cache, k, v, self.slots)
        out = paged_attention(
            q,
            cache.k,
            cache.v,
            self.page_table,
            self.context_lens,
            self.positions,
            self.ancestors,
            window=window,
            first_slot=self.first_slot,
            order_invariant=self.order_invariant,
        )
        return out, cache


def dense_causal_attend(
    cache: None,
    q: Array,
    k: Array,
    v: Array,
    window: int | None,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> tuple[Array, None]:
    """An Attend over the T tokens themselves, without a cache.

    ``cudnn`` is a flash kernel for bfloat16 on NVIDIA GPUs: it never writes the [T, T] scores.
    """
    local = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=local, implementation=implementation
    )
    return jnp.asarray(out), cache
