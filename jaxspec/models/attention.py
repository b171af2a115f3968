"""How the tokens of a pass attend to the past: paged, or dense for training and references.

This file and forward.py are the one place where model code calls kernels by operation name
(paged_attention here, add_rms_norm and rope_kv_write there). Mixers and MLPs name none.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import PagedKV
from jaxspec.models.forward import Heads
from pallas_kernels.paged_attention import paged_attention


@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """Positions and slots of a pass's T tokens, and an Attend function over paged caches.

    When called, it writes the tokens' keys and values, then attends. A mixer that is not attention
    reads the fields instead.

    Attributes:
      rows: [B] index of each row in states with an entry per row.
      page_table: [B, M] pages of each sequence.
      context_lens: [B] committed slots.
      slots: [B, T] slots that the tokens' keys and values are written to (0: the null page).
      positions: [B, T] positions of the tokens in slots, for sliding windows.
      kv_lens: [B] end of each sequence's slots; kv_lens - context_lens of the T tokens are not
        padding.
      ancestors: [B, T, words] tree mask past the context, or None for consecutive tokens.
      first_slot, order_invariant: see paged_attention.
    """

    rows: Array
    page_table: Array
    context_lens: Array
    slots: Array
    positions: Array
    kv_lens: Array
    ancestors: Array | None = None
    first_slot: int = 0
    order_invariant: bool = False

    def __call__(self, state: PagedKV, heads: Heads, window: int | None) -> tuple[Array, PagedKV]:
        q, k_pages, v_pages = heads.written(state.k, state.v, self.slots)
        out = paged_attention(
            q,
            k_pages,
            v_pages,
            self.page_table,
            self.context_lens,
            self.positions,
            self.ancestors,
            kv_lens=self.kv_lens,
            window=window,
            first_slot=self.first_slot,
            order_invariant=self.order_invariant,
            implementation=heads.kernels.implementation("paged_attention"),
        )
        return out, state.replace(k=k_pages, v=v_pages)


def dense_causal_attend(
    state: None, heads: Heads, window: int | None, implementation: Literal["xla", "cudnn"] = "xla"
) -> tuple[Array, None]:
    """An Attend function over the pass's own T tokens, without a cache."""
    return dense_causal_attention(*heads.rotated(), window, implementation), state


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
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else None):
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation=implementation
        )
    return jnp.asarray(out)
