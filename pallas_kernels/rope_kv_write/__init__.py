"""From one projection's output to queries, and keys and values in the cache, in one launch."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.rope_kv_write.reference import rope_kv_write_reference
from pallas_kernels.selection import Implementation, kernel_module

HEAD_DIM = 128  # the kernel's: a value for each thread of a warpgroup


@jax.named_scope("rope_kv_write")
def rope_kv_write(
    parts: Array,
    rope: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    k_pages: Array,
    v_pages: Array,
    slots: Array,
    *,
    eps: float,
    implementation: Implementation = "reference",
) -> tuple[Array, Array, Array]:
    """Norm and rotate queries and keys; write keys and values to their slots.

    Args:
      parts: [S, B, T, G, R, D], to be summed: of each KV head its queries, then its key, then its
        value; so R = Q / G + 2. Rows past B are padding. See products.py.
      rope: cosines and sines of the rotations, float32 [B, T, 2, 2, D / 2], for a head's two
        halves; the sine's first row is negated.
      q_norm, k_norm: [D] weights of a root-mean-square norm before the rotation, or None.
      k_pages, v_pages: [P, G, K, D]; written in place where the caller gives them up.
      slots: int32 [B, T], ``page * K + offset``; distinct, but for those of the null page 0.
      implementation: "auto" takes the Hopper kernel where it fits (bfloat16, heads
        of 128), else the reference.

    Returns queries [B, T, Q, D], in the pages' dtype, and the pages.

    Raises ValueError for arguments that the kernel cannot take when it is named.
    """
    reference = functools.partial(rope_kv_write_reference, eps=eps)
    arguments = (parts, rope, q_norm, k_norm, k_pages, v_pages, slots)
    problem = misfit(parts, k_pages, v_pages)
    mosaic = kernel_module("rope_kv_write", implementation, problem)
    if mosaic is None:
        return reference(*arguments)
    kernel = functools.partial(mosaic.rope_kv_write_mosaic, eps=eps)
    return with_reference_gradient(kernel, reference)(*arguments)


def misfit(parts: Array, k_pages: Array, v_pages: Array) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    if not k_pages.dtype == v_pages.dtype == jnp.bfloat16:
        return f"{k_pages.dtype} and {v_pages.dtype} pages: both must be bfloat16"
    head_dim = parts.shape[-1]
    if not takes_parts(k_pages.dtype, head_dim):
        return f"heads of {head_dim}: they must be {HEAD_DIM} wide"
    return None


def takes_parts(dtype: jax.typing.DTypeLike, width: int) -> bool:
    """Whether the kernel takes heads of this dtype and width: it adds up float32 parts of them."""
    return jnp.dtype(dtype) == jnp.bfloat16 and width == HEAD_DIM
