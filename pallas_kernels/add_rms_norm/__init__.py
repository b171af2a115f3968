"""Addition to the residual stream and the RMS norm that follows, in one pass."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.gradients import with_reference_gradient
from pallas_kernels.packed_product.tuning import scaled_rows
from pallas_kernels.round_tokens import GROUPED_STEP, round_tokens
from pallas_kernels.round_tokens.reference import GROUP
from pallas_kernels.selection import Implementation, kernel_module

WIDTH_STEP = 256  # the kernel's row width is a multiple: two entries for each of 128 threads
MAX_WIDTH = 16384  # widest row that fits the registers of a warpgroup


def add_rms_norm(
    x: Array,
    partials: Array | ChosenProducts,
    weight: Array,
    eps: float,
    implementation: Implementation = "reference",
    beside: Array | None = None,
) -> tuple[Array, Array]:
    """Add a split-K product to x, and compute the root-mean-square norm of the sum.

    Args:
      x: [B, ..., H]
      partials: [S, B, ..., H] split-K partial sums, or S = 1 for an unsplit product (see
        products.py). Their sum is rounded to x's dtype before it is added. Rows past x's are
        padding. Or the products of chosen experts, weighted and added up here.
      weight: [H], multiplies the norm.
      implementation: see selection.Implementation; the Hopper kernel takes bfloat16, H a multiple
        of 256 up to 16384.
      beside: [1, R, H], rows that follow the normed ones as they are. With them the kernel has no
        gradient.

    Returns the sum and the normed sum, both [B, ..., H]; with ``beside`` the second is
    [1, B * ... + R, H]. The norm is computed in float32.
    """
    reference = functools.partial(add_rms_norm_reference, eps=eps)
    mosaic = kernel_module("add_rms_norm", implementation, misfit(x, weight))
    if mosaic is None:
        return reference(x, partials, weight, beside=beside)
    kernel = functools.partial(mosaic.add_rms_norm_mosaic, eps=eps)
    if beside is not None:
        return kernel(x, partials, weight, beside=beside)
    return with_reference_gradient(kernel, reference)(x, partials, weight)


def add_rms_norm_rounded(
    x: Array,
    partials: Array | ChosenProducts,
    weight: Array,
    eps: float,
    implementation: Implementation = "reference",
) -> tuple[Array, Array, Array]:
    """add_rms_norm with the normed sum rounded to 8-bit floats (see round_tokens).

    Returns the sum [B, ..., H], e4m3 [B, ..., H], and float32 scales [1, P] of the rows, padded as
    those of round_tokens.
    """
    mosaic = kernel_module("add_rms_norm", implementation, misfit(x, weight))
    if mosaic is not None:
        padded = scaled_rows(x.size // x.shape[-1])
        return mosaic.add_rms_norm_rounded_mosaic(x, partials, weight, eps, padded)
    total, _, rounded, scale = _rounded_reference(x, partials, weight, eps, 1)
    return total, rounded, scale


def add_rms_norm_grouped(
    x: Array,
    partials: Array | ChosenProducts,
    weight: Array,
    eps: float,
    implementation: Implementation = "reference",
) -> tuple[Array, Array, Array, Array]:
    """add_rms_norm, and the normed sum rounded to 8-bit floats with a scale for every 128 entries.

    The Hopper kernel takes what ``misfit_of_groups`` says.

    Returns the sum and the normed sum [B, ..., H], e4m3 [B, ..., H], and float32 scales
    [H / 128, P] of the rows, padded as those of round_tokens.
    """
    mosaic = kernel_module("add_rms_norm", implementation, misfit_of_groups(x, weight))
    if mosaic is not None:
        padded = scaled_rows(x.size // x.shape[-1])
        return mosaic.add_rms_norm_grouped_mosaic(x, partials, weight, eps, padded)
    return _rounded_reference(x, partials, weight, eps, x.shape[-1] // GROUP)


def _rounded_reference(
    x: Array, partials: Array | ChosenProducts, weight: Array, eps: float, num_groups: int
) -> tuple[Array, Array, Array, Array]:
    total, normed = add_rms_norm_reference(x, partials, weight, eps)
    rounded, scale = round_tokens(normed.reshape(-1, x.shape[-1]), num_groups)
    return total, normed, rounded.reshape(x.shape), scale


def misfit(x: Array, weight: Array) -> str | None:
    """Why the kernel cannot take these rows, None if it can."""
    width = x.shape[-1]
    if not x.dtype == weight.dtype == jnp.bfloat16:
        return f"{x.dtype} rows and {weight.dtype} weights: both must be bfloat16"
    if not takes_partials(x.dtype, width):
        return f"rows of {width}: a multiple of {WIDTH_STEP} up to {MAX_WIDTH}"
    return None


def misfit_of_groups(x: Array, weight: Array) -> str | None:
    """Why the kernel cannot round these rows in groups, None if it can."""
    if x.shape[-1] % GROUPED_STEP:
        return f"rows of {x.shape[-1]}: a multiple of {GROUPED_STEP} to round them in groups"
    return misfit(x, weight)


def takes_partials(dtype: jax.typing.DTypeLike, width: int) -> bool:
    """Whether the kernel takes rows of this dtype and width; if so, also as partial sums."""
    return jnp.dtype(dtype) == jnp.bfloat16 and width % WIDTH_STEP == 0 and width <= MAX_WIDTH
