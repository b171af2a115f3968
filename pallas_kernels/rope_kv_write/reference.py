"""The specification of rope_kv_write in jnp; it runs where the kernel does not."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.float8 import encode
from pallas_kernels.pages import LayerPages
from pallas_kernels.products import sum_partials

Index = tuple[Any, ...]


class HeadNorms(NamedTuple):
    """Weights [D] of root-mean-square norms of queries and of keys, or None."""

    q: Array | None = None
    k: Array | None = None


def apply_rope(x: Array, rope: Array) -> Array:
    """Rotate heads x [B, T, G, R, D]; entry i is paired with i + D / 2, as in Llama checkpoints.
    If ``rope`` is for fewer pairs, the entries past them stay as they are.

    ``rope``: float32 [B, T, 2, 2, D / 2], see rope_kv_write. The halves are swapped by jnp.flip,
    which XLA fuses with what follows. A concatenation would be a separate kernel in every layer.
    """
    width = 2 * rope.shape[-1]
    if width < x.shape[-1]:
        rotated = apply_rope(x[..., :width], rope)
        return jnp.concatenate([rotated, x[..., width:]], axis=-1)
    cos, sin = (rope[:, :, None, None, index] for index in range(2))
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    rotated = halves * cos + jnp.flip(halves, axis=-2) * sin
    return rotated.reshape(x.shape).astype(x.dtype)


@jax.named_scope("rope")
def rotated_heads(
    qkv: Array,  # [B, T, G, R, D]
    rope: Array,
    q_norm: Array | None,  # [D]
    k_norm: Array | None,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Queries [B, T, Q, D] and keys [B, T, G, D], normed and rotated; values [B, T, G, D]."""
    q, k, v = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1, :]
    q, k = (
        apply_rope(x if norm is None else rms_norm(x, norm, eps), rope)
        for x, norm in ((q, q_norm), (k, k_norm))
    )
    return q.reshape(*qkv.shape[:2], -1, qkv.shape[-1]), k[..., 0, :], v


def write_rows(pages: Array, rows: Array, slots: Array) -> Array:
    """Write rows [B, T, G, D] to slots [B, T] of pages [P, G, K, D]."""

    # Slots are distinct, except for those of the null page, which is never read. Without
    # unique_indices a GPU would serialize the scatter.
    def write(pages: Array, rows: Array, index: Index) -> Array:
        return pages.at[index].set(rows, mode="promise_in_bounds", unique_indices=True)

    return _at_slots(write, pages, rows.astype(pages.dtype), slots)


def read_rows(pages: Array, slots: Array) -> Array:
    """The rows [B, T, G, D] at slots [B, T] of pages [P, G, K, D]."""

    def read(pages: Array, index: Index) -> Array:
        return pages.at[index].get(mode="promise_in_bounds")

    return _at_slots(read, pages, slots)


def _at_slots(act: Callable[..., Array], pages: Array, *rows_and_slots: Array) -> Array:
    """``act`` on pages, rows and the index of the slots, in the form that suits the device.

    On a TPU every (slot, head) has an index. If only slots had one, XLA would keep the pages of a
    loop in another layout than attention reads, and copy all of them in every layer.
    """
    *rows, slots = rows_and_slots
    kv_heads, page_size = pages.shape[1:3]

    def by_slot(pages: Array, slots: Array, *rows: Array) -> Array:
        return act(pages, *rows, (slots // page_size, slice(None), slots % page_size))

    def by_head(pages: Array, slots: Array, *rows: Array) -> Array:
        page, offset = (slots // page_size)[..., None], (slots % page_size)[..., None]
        return act(pages, *rows, (page, jnp.arange(kv_heads), offset))

    return lax.platform_dependent(pages, slots, *rows, tpu=by_head, default=by_slot)


# jit: traced and lowered once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("eps", "dtype"))
def rope_kv_write_reference(
    partials: Array,
    rope: Array,
    norms: HeadNorms,
    pages: LayerPages,
    slots: Array,
    *,
    eps: float,
    dtype: jnp.dtype | None = None,
) -> tuple[Array, Array, Array]:
    """See pallas_kernels.rope_kv_write.rope_kv_write."""
    qkv = sum_partials(partials, len(slots), pages.k.dtype if dtype is None else dtype)
    q, k, v = rotated_heads(qkv, rope, norms.q, norms.k, eps)
    if pages.k_scale is not None and pages.v_scale is not None:
        k, v = encode(k, pages.k_scale), encode(v, pages.v_scale)
    with jax.named_scope("kv_write"):
        return q, write_rows(pages.k, k, slots), write_rows(pages.v, v, slots)
