"""How the tokens of a pass attend to the past: paged, or dense for training and references.

This file and forward.py are the one place where model code calls kernels by operation name
(paged_attention and partial_attention here, add_rms_norm and rope_kv_write there). Mixers and MLPs
name none.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import PagedKV
from jaxspec.cache.spread import own_slots
from jaxspec.collectives import shard_offset
from jaxspec.models.forward import Heads
from jaxspec.parallel import Axes
from jaxspec.pytree import Pytree, array, pytree, static
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.partial import (
    PartialAttention,
    merge_partials,
    partial_attention,
    with_sinks,
)
from pallas_kernels.paged_attention.reference import MASKED


@pytree
class PagedAttend(Pytree):
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

    rows: Array = array("batch")
    page_table: Array = array("batch", "table")
    context_lens: Array = array("batch")
    slots: Array = array("batch", "length")
    positions: Array = array("batch", "length")
    kv_lens: Array = array("batch")
    ancestors: Array | None = array("batch", "nodes", "words", default=None)
    first_slot: int = static(default=0)
    order_invariant: bool = static(default=False)

    def __call__(self, state: PagedKV, heads: Heads, window: int | None) -> tuple[Array, PagedKV]:
        if state.spread:
            return self._spread(state, heads, window)
        q, k_pages, v_pages = heads.written(state.k, state.v, self.slots)
        out = paged_attention(
            q,
            k_pages,
            v_pages,
            self.page_table,
            self.context_lens,
            self.positions,
            self.ancestors,
            self.kv_lens,
            *heads.scales,
            heads.sinks,
            window=window,
            first_slot=self.first_slot,
            order_invariant=self.order_invariant,
            implementation=heads.kernels.over_pages("paged_attention", k_pages),
        )
        return out, state.replace(k=k_pages, v=v_pages)

    def _spread(self, state: PagedKV, heads: Heads, window: int | None) -> tuple[Array, PagedKV]:
        """As __call__, where devices have a part of every page each: all queries attend to each
        part, and the parts of their softmaxes are merged.

        Raises ValueError for sums that must not depend on the order of slots.
        """
        if self.order_invariant:
            raise ValueError(
                "sums that do not depend on the order of slots need whole sequences on a device: "
                "take sp 1, or leave out deterministic and verify_width"
            )
        own_size, axes = state.k.shape[2], state.spread
        slots = own_slots(self.slots, own_size, axes)
        q, k_pages, v_pages = heads.of_all_tokens().written(state.k, state.v, slots)
        part = partial_attention(
            q,
            k_pages,
            v_pages,
            self.page_table,
            self.context_lens,
            self.positions,
            self.ancestors,
            self.kv_lens,
            shard_offset(own_size, axes),
            *heads.scales,
            page_size=state.page_size,
            window=window,
            first_slot=self.first_slot,
            implementation=heads.kernels.over_pages("partial_attention", k_pages),
        )
        count = heads.partials.shape[2] if heads.tokens else None
        out = _merged(part, axes, count, heads.sinks)
        return out.astype(q.dtype), state.replace(k=k_pages, v=v_pages)


@jax.named_scope("attention")
def _merged(
    part: PartialAttention, axes: Axes, own_count: int | None, sinks: Array | None
) -> Array:
    """Attention over the slots of all devices: float32 [B, T, Q, D]. In one collective.

    ``own_count``: each device gets the next so many tokens only, with padding after the last.
    """
    if sinks is not None:  # one device has the slot
        is_first = lax.axis_index(axes) == 0
        part = with_sinks(part, jnp.where(is_first, sinks, MASKED))
    own = jnp.concatenate([part.weighted, jnp.stack([part.peak, part.total], -1)], axis=-1)
    if own_count is None:
        parts = lax.all_gather(own, axes)
    else:
        missing = own_count * lax.axis_size(axes) - own.shape[1]
        padded = jnp.pad(own, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=1.0)
        split = padded.reshape(own.shape[0], -1, own_count, *own.shape[2:])
        parts = lax.all_to_all(split.swapaxes(0, 1), axes, split_axis=0, concat_axis=0)
    return merge_partials(PartialAttention(parts[..., :-2], parts[..., -2], parts[..., -1]))


def dense_causal_attend(
    state: None, heads: Heads, window: int | None, implementation: Literal["xla", "cudnn"] = "xla"
) -> tuple[Array, None]:
    """An Attend function over the pass's own T tokens, without a cache."""
    q, k, v = heads.rotated()
    if heads.sinks is not None:
        return _dense_with_sinks(q, k, v, window, heads.sinks), state
    return dense_causal_attention(q, k, v, window, implementation), state


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


def _dense_with_sinks(q: Array, k: Array, v: Array, window: int | None, sinks: Array) -> Array:
    """As dense_causal_attention, with one more key for all tokens: its scores are ``sinks`` [Q],
    its value is zero."""
    length, num_heads = q.shape[1:3]
    age = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (age >= 0) & (age < (window or length))
    ends = ((0, 0), (0, 1), (0, 0), (0, 0))
    bias = jnp.zeros((1, num_heads, length, length + 1), q.dtype)
    bias = bias.at[..., -1].set(sinks.astype(q.dtype)[:, None])
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else None):
        out = jax.nn.dot_product_attention(
            q,
            jnp.pad(k, ends),
            jnp.pad(v, ends),
            bias=bias,
            mask=jnp.pad(seen, ((0, 0), (0, 1)), constant_values=True)[None, None],
        )
    return jnp.asarray(out)
