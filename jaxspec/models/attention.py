"""How a forward pass's tokens see the past: paged, or dense for training and for references."""

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
    """Where the T tokens of a pass lie, and an Attend over paged caches: it writes their keys and
    values, then attends. A mixer of another kind reads the fields.

    Attributes:
      rows: [B] the rows' places in a state that keeps something for each row.
      page_table: [B, M] pages of each sequence.
      context_lens: [B] committed slots.
      slots: [B, T] where the tokens' own keys and values go (0: the null page).
      positions: [B, T] the tokens' positions in slots, for sliding windows.
      kv_lens: [B] slots from here on hold nothing; so kv_lens - context_lens tokens are real.
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
    """An Attend over the T tokens themselves, without a cache."""
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
