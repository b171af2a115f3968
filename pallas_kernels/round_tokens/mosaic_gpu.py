"""Rounding of rows to 8-bit floats on Hopper GPUs: one warpgroup per row."""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.kernel_names import fixed_name
from pallas_kernels.round_tokens.reference import FLOAT8, rounded_by, scale_of

THREADS = 128  # of a warpgroup


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("padded", "interpret"))
def round_tokens_mosaic(x: Array, padded: int, *, interpret: Any = None) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_tokens; only for rows that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    rows, width = x.shape
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))

    @fixed_name(interpret)
    def round_tokens_kernel(x_ref, rounded_ref, scale_ref):
        row = lax.axis_index("row")
        wide = plgpu.load(x_ref.at[row], layout=layout).astype(jnp.float32)
        scale = scale_of(jnp.max(jnp.abs(wide)))
        rounded_ref[row] = rounded_by(wide, scale)
        scale_ref[0, row] = scale

    kernel = plgpu.kernel(
        round_tokens_kernel,
        out_type=(
            jax.ShapeDtypeStruct((rows, width), FLOAT8),
            jax.ShapeDtypeStruct((1, padded), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(x)
