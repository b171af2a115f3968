"""The residual stream's addition and the norm after it, in one pass."""

import functools

from jax import Array

from pallas_kernels.add_rms_norm.mosaic_gpu import add_rms_norm_mosaic, misfit
from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.tuning import Implementation, use_kernel


def add_rms_norm(
    x: Array, y: Array, weight: Array, eps: float, implementation: Implementation = "auto"
) -> tuple[Array, Array]:
    """x + y, and its root-mean-square norm times ``weight``.

    Args:
      x, y: [..., H] of one dtype.
      weight: [H]
      implementation: "auto" takes the Hopper kernel where it was measured and fits (bfloat16, H a
        multiple of 256 up to 16384), else the reference.

    Returns the sum and the normed sum, both [..., H]. The norm's arithmetic is float32.

    Raises ValueError for arguments that the kernel cannot take when it is named.
    """
    problem = misfit(x, y, weight)
    if implementation == "mosaic_gpu" and problem is not None:
        raise ValueError(f"the kernel cannot take {problem}")
    if implementation == "mosaic_gpu" or (
        implementation == "auto" and problem is None and use_kernel("add_rms_norm")
    ):
        kernel = functools.partial(add_rms_norm_mosaic, eps=eps)
        reference = functools.partial(add_rms_norm_reference, eps=eps)
        return with_reference_gradient(kernel, reference)(x, y, weight)
    return add_rms_norm_reference(x, y, weight, eps)
