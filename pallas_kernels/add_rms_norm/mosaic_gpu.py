"""Residual addition and norm on Hopper GPUs: a warpgroup a row.

Clusters of 2 to 8 blocks a row were slower on an H100 (48 rows of 4096: 3.6 to 4.1 us; 3.5 alone).
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.products import total_f32

THREADS = 128  # of a warpgroup


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm_mosaic(
    x: Array,  # [..., H]
    parts: Array,  # [S, ..., H]
    weight: Array,  # [H]
    eps: float,
    *,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only where ``misfit`` finds nothing.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    num_parts, hidden = len(parts), x.shape[-1]
    rows = x.size // hidden
    # One for all dtypes: each would have its own by default.
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=math.gcd(hidden // THREADS, 4))

    def add_rms_norm_kernel(x_ref, parts_ref, weight_ref, total_ref, normed_ref):
        row = lax.axis_index("row")

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout)

        residual = load(x_ref.at[row])
        added = [load(parts_ref.at[part, row]) for part in range(num_parts)]
        scales = load(weight_ref)
        y = total_f32(added).astype(x.dtype)  # as a product in one part is rounded
        total = (residual.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
        total_ref[row] = total
        wide = total.astype(jnp.float32)  # as the residual stream holds it
        scale = lax.rsqrt(jnp.sum(wide * wide) / hidden + eps)
        normed_ref[row] = (wide * scale).astype(x.dtype) * scales

    flat = jax.ShapeDtypeStruct((rows, hidden), x.dtype)
    kernel = plgpu.kernel(
        add_rms_norm_kernel,
        out_type=(flat, flat),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    total, normed = kernel(x.reshape(rows, hidden), parts.reshape(num_parts, -1, hidden), weight)
    return total.reshape(x.shape), normed.reshape(x.shape)
