"""The residual stream's addition and the norm after it, in one pass."""

import functools

import jax.numpy as jnp
from jax import Array

from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.tuning import Implementation, kernel_module

WIDTH_STEP = 256  # of the kernel's rows: two entries for each of a warpgroup's 128 threads


def add_rms_norm(
    x: Array, parts: Array, weight: Array, eps: float, implementation: Implementation = "auto"
) -> tuple[Array, Array]:
    """x plus the parts, and its root-mean-square norm times ``weight``.

    Args:
      x: [..., H]
      parts: [S, ..., H]; their sum is rounded to x's dtype before it is added. Rows past x's are
        padding. See products.py.
      weight: [H]
      implementation: "auto" takes the Hopper kernel where it was measured and fits (bfloat16, H a
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
    if not x.dtype == weight.dtype == jnp.bfloat16:
        return f"{x.dtype} rows and {weight.dtype} weights: both must be bfloat16"
    if x.shape[-1] % WIDTH_STEP or x.shape[-1] > 16384:
        return f"rows of {x.shape[-1]}: a multiple of {WIDTH_STEP} up to 16384"
    return None
