"""The residual stream's addition and the norm after it, in one pass."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.selection import Implementation, kernel_module

WIDTH_STEP = 256  # of the kernel's rows: two entries for each of a warpgroup's 128 threads
MOST_WIDTH = 16384  # that registers hold


def add_rms_norm(
    x: Array, parts: Array, weight: Array, eps: float, implementation: Implementation = "reference"
) -> tuple[Array, Array]:
    """x plus the parts, and its root-mean-square norm times ``weight``.

    Args:
      x: [..., H]
      parts: [S, ..., H]; their sum is rounded to x's dtype before it is added. Rows past x's are
        padding. See products.py.
      weight: [H]
      implementation: "auto" takes the Hopper kernel where it fits (bfloat16, H a
        multiple of 256 up to 16384), else the reference.

    Returns the sum and the normed sum, both [..., H]. The norm's arithmetic is float32.

    Raises ValueError for arguments that the kernel cannot take when it is named.
    """
    reference = functools.partial(add_rms_norm_reference, eps=eps)
    mosaic = kernel_module("add_rms_norm", implementation, misfit(x, parts, weight))
    if mosaic is None:
        return reference(x, parts, weight)
    kernel = functools.partial(mosaic.add_rms_norm_mosaic, eps=eps)
    return with_reference_gradient(kernel, reference)(x, parts, weight)


def misfit(x: Array, parts: Array, weight: Array) -> str | None:
    """Why the kernel cannot take these rows, None if it can."""
    width = x.shape[-1]
    if not x.dtype == weight.dtype == jnp.bfloat16:
        return f"{x.dtype} rows and {weight.dtype} weights: both must be bfloat16"
    if not takes_parts(x.dtype, width):
        return f"rows of {width}: a multiple of {WIDTH_STEP} up to {MOST_WIDTH}"
    return None


def takes_parts(dtype: jax.typing.DTypeLike, width: int) -> bool:
    """Whether the kernel takes rows of this dtype and width: it adds up float32 parts of them."""
    return jnp.dtype(dtype) == jnp.bfloat16 and width % WIDTH_STEP == 0 and width <= MOST_WIDTH
