"""Residual addition and norm on Hopper GPUs: one warpgroup per row.

Clusters of 2 to 8 blocks per row were slower on an H100 (48 rows of 4096: 3.6 to 4.1 us, against
3.5 us with one block).
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
    partials: Array,  # [S, ..., H]
    weight: Array,  # [H]
    eps: float,
    *,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    num_splits, hidden = len(partials), x.shape[-1]
    rows = x.size // hidden
    # The same layout for all dtypes; the default depends on the dtype.
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=math.gcd(hidden // THREADS, 4))

    def add_rms_norm_kernel(x_ref, partials_ref, weight_ref, total_ref, normed_ref):
        row = lax.axis_index("row")

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout)

        residual = load(x_ref.at[row])
        added = [load(partials_ref.at[split, row]) for split in range(num_splits)]
        scales = load(weight_ref)
        y = total_f32(added).astype(x.dtype)  # rounded as an unsplit product is
        total = (residual.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
        total_ref[row] = total
        wide = total.astype(jnp.float32)  # from the rounded sum, as the reference does
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
    total, normed = kernel(
        x.reshape(rows, hidden), partials.reshape(num_splits, -1, hidden), weight
    )
    return total.reshape(x.shape), normed.reshape(x.shape)
