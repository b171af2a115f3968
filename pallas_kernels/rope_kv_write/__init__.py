"""Norm and rotation of queries and keys, and the write to the KV cache, in one launch."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import BYTES, check_scales, is_float8
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.pages import LayerPages
from pallas_kernels.rope_kv_write.reference import HeadNorms, rope_kv_write_reference
from pallas_kernels.selection import Implementation, kernel_module

HEAD_DIMS = (128, 256)  # of the kernel: one or two entries for each thread of a warpgroup


@jax.named_scope("rope_kv_write")
def rope_kv_write(
    partials: Array,
    rope: Array,
    norms: HeadNorms,
    pages: LayerPages,
    slots: Array,
    *,
    eps: float,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = "reference",
) -> tuple[Array, Array, Array]:
    """Norm and rotate queries and keys; write keys and values to their slots.

    Args:
      partials: [S, B, T, G, R, D] split-K partial sums of the qkv projection, or S = 1 for an
        unsplit product (see products.py). The R = Q / G + 2 heads of a KV head are its queries, its
        key and its value, in this order. Rows past the batch are padding.
      rope: cosines and sines of the rotations, float32 [B, T, 2, 2, D / 2]: index 0 of the third
        dimension is the cosine, the fourth dimension the two halves of a head. The sine of the
        first half is negated. A last dimension r below D / 2: only the first 2 r entries of a head
        are rotated.
      norms: of queries and keys before the rotation.
      pages: of the layer; written in place where the caller donates them. Scales are above 0.
      slots: int32 [B, T], ``page * K + offset``; distinct, except for slots of the null page 0.
      dtype: of the queries, and of keys and values before they become bytes; None: the pages'.
      implementation: see selection.Implementation; the Hopper kernel takes bfloat16, heads of 128
        or 256, of which an even number of pairs is rotated.

    Returns queries [B, T, Q, D], and the pages of keys and of values.

    Raises ValueError for pages of bytes without scales or a dtype, for scales of other pages, and
    if ``implementation`` is "mosaic_gpu" and the kernel cannot take the arguments.
    """
    check_scales(*pages)
    if dtype is None and is_float8(pages.k):
        raise ValueError("pages of bytes do not say which dtype queries have: give dtype")
    query_dtype = None if dtype is None or dtype == pages.k.dtype else jnp.dtype(dtype)
    reference = functools.partial(rope_kv_write_reference, eps=eps, dtype=query_dtype)
    arguments = (partials, rope, norms, pages, slots)
    problem = misfit(partials, pages.k, pages.v, query_dtype, rope.shape[-1])
    mosaic = kernel_module("rope_kv_write", implementation, problem)
    if mosaic is None:
        return reference(*arguments)
    kernel = functools.partial(mosaic.rope_kv_write_mosaic, eps=eps, dtype=query_dtype)
    return with_reference_gradient(kernel, reference)(*arguments)


def misfit(
    partials: Array,
    k_pages: Array,
    v_pages: Array,
    dtype: jnp.dtype | None = None,
    pairs: int | None = None,
) -> str | None:
    """Why the kernel cannot take these arguments, None if it can.

    Args:
      dtype: of the queries, if it is not the pages'.
      pairs: of entries that are rotated, the last dimension of ``rope``; None: all.
    """
    if k_pages.dtype != v_pages.dtype or k_pages.dtype not in (jnp.bfloat16, BYTES):
        return f"{k_pages.dtype} and {v_pages.dtype} pages: both must be bfloat16, or bytes"
    queries, head_dim = k_pages.dtype if dtype is None else dtype, partials.shape[-1]
    if queries != jnp.bfloat16:
        return f"{queries} queries: they must be bfloat16"
    if not takes_partials(queries, head_dim):
        return f"heads of {head_dim}: they must be {' or '.join(map(str, HEAD_DIMS))} wide"
    if pairs is not None and not takes_pairs(pairs):
        return f"heads of which {pairs} pairs are rotated: the number must be even and above 0"
    return None


def takes_partials(dtype: jax.typing.DTypeLike, width: int) -> bool:
    """Whether the kernel takes heads of this dtype and width; if so, also as partial sums."""
    return jnp.dtype(dtype) == jnp.bfloat16 and width in HEAD_DIMS


def takes_pairs(pairs: int) -> bool:
    """Whether the kernel rotates so many pairs of a head's entries. (It reads entries two by two,
    from the first one's partner on.)"""
    return pairs > 0 and pairs % 2 == 0
