"""Sum over devices, addition to the residual stream, and the RMS norm that follows, in one pass.

For a row-parallel product, inside shard_map: each device holds a partial sum of all rows.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.reduce_add_rms_norm.exchange import (
    DEVICES,
    MAX_WIDTH,
    WIDTH_STEP,
    Tuning,
)
from pallas_kernels.reduce_add_rms_norm.reference import reduce_add_rms_norm_reference
from pallas_kernels.selection import Implementation, kernel_module


def reduce_add_rms_norm(
    x: Array,
    partials: Array,
    weight: Array,
    eps: float,
    axis: str,
    exchange: Array | None = None,
    implementation: Implementation = "reference",
    tuning: Tuning | None = None,
) -> tuple[Array, Array]:
    """Sum a product over the devices of a mesh axis, add it to x, and compute the sum's norm.

    All devices of the axis get the same bits: the product of each is rounded to x's dtype, they are
    added in float32 in the order of the devices, and the sum is rounded once.

    Args:
      x: [B, ..., H], the same on all devices of the axis.
      partials: [S, B, ..., H] split-K partial sums of this device's part of the product, or S = 1
        for an unsplit product (see products.py). Rows past x's are padding.
      weight: [H], multiplies the norm.
      axis: the mesh axis; the call is inside shard_map.
      exchange: this device's part of a result of ``exchange.make_exchange`` for this axis and
        width, in which devices leave rows for each other. The kernel writes to it, though it is
        an argument: no two calls with the same exchange may run at once, all devices must make
        the same calls in the same order, and its buffer must not be donated. The kernel needs it.
      implementation: see selection.Implementation; the Hopper kernel takes bfloat16, H a multiple
        of 512 up to 8192, at most 512 rows, 2, 4 or 8 devices that reach each other's memory.
      tuning: of the kernel; the exchange was made for it. None: Tuning.of.

    Returns the sum and the normed sum, both [B, ..., H]. The norm is computed in float32.
    """
    problem = misfit(x, weight, axis, exchange, tuning)
    mosaic = kernel_module("reduce_add_rms_norm", implementation, problem)
    if mosaic is None:
        return reduce_add_rms_norm_reference(x, partials, weight, eps, axis)
    return mosaic.reduce_add_rms_norm_mosaic(x, partials, weight, exchange, eps, axis, tuning)


def misfit(
    x: Array, weight: Array, axis: str, exchange: Array | None, tuning: Tuning | None = None
) -> str | None:
    """Why the kernel cannot take these rows, None if it can."""
    width, devices = x.shape[-1], jax.lax.axis_size(axis)
    if not x.dtype == weight.dtype == jnp.bfloat16:
        return f"{x.dtype} rows and {weight.dtype} weights: both must be bfloat16"
    if width % WIDTH_STEP or width > MAX_WIDTH:
        return f"rows of {width}: a multiple of {WIDTH_STEP} up to {MAX_WIDTH}"
    if devices not in DEVICES:
        return f"{devices} devices: {DEVICES}"
    chosen = tuning or Tuning.of(devices, width)
    if x.size // width > chosen.most_rows:
        return f"{x.size // width} rows: at most {chosen.most_rows}"
    if exchange is None:
        return "a call without an exchange: make one with make_exchange"
    wanted = (1, chosen.words(devices, width))
    if exchange.shape != wanted or exchange.dtype != jnp.int32:
        return f"an exchange of {exchange.dtype} {exchange.shape}: int32 {wanted}"
    return None


def takes_partials(dtype: jax.typing.DTypeLike, width: int) -> bool:
    """Whether the kernel takes rows of this dtype and width; if so, also as partial sums."""
    return jnp.dtype(dtype) == jnp.bfloat16 and width % WIDTH_STEP == 0 and width <= MAX_WIDTH
