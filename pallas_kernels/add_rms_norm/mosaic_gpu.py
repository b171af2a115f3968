"""Residual addition and norm on Hopper GPUs: one warpgroup a row, one launch instead of two."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

THREADS = 128  # of a warpgroup


def misfit(x: Array, y: Array, weight: Array) -> str | None:
    """Why the kernel cannot take these rows, None if it can."""
    if not x.dtype == y.dtype == weight.dtype == jnp.bfloat16:
        return f"{x.dtype} and {y.dtype} rows, {weight.dtype} weights: all must be bfloat16"
    if x.shape[-1] % (2 * THREADS) or x.shape[-1] > 16384:
        return f"rows of {x.shape[-1]}: a multiple of {2 * THREADS} up to 16384"
    return None


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm_mosaic(
    x: Array, y: Array, weight: Array, eps: float, interpret: Any = None
) -> tuple[Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only where ``misfit`` finds nothing.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    hidden = x.shape[-1]
    rows = x.size // hidden

    def add_rms_norm_kernel(x_ref, y_ref, weight_ref, total_ref, normed_ref):
        row = lax.axis_index("row")
        wide = plgpu.load(x_ref.at[row]).astype(jnp.float32)
        wide += plgpu.load(y_ref.at[row]).astype(jnp.float32)
        total = wide.astype(x.dtype)
        total_ref[row] = total
        rounded = total.astype(jnp.float32)  # as the residual stream holds it
        scale = lax.rsqrt(jnp.sum(rounded * rounded) / hidden + eps)
        normed_ref[row] = (rounded * scale).astype(x.dtype) * plgpu.load(weight_ref)

    flat = jax.ShapeDtypeStruct((rows, hidden), x.dtype)
    kernel = plgpu.kernel(
        add_rms_norm_kernel,
        out_type=(flat, flat),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
    )
    total, normed = kernel(x.reshape(rows, hidden), y.reshape(rows, hidden), weight)
    return total.reshape(x.shape), normed.reshape(x.shape)
