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

from pallas_kernels.kernel_names import fixed_name
from pallas_kernels.products import total_f32
from pallas_kernels.round_tokens.reference import FLOAT8, rounded_by, scale_of

THREADS = 128  # of a warpgroup


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "padded", "interpret"))
def add_rms_norm_mosaic(
    x: Array,  # [..., H]
    partials: Array,  # [S, ..., H]
    weight: Array,  # [H]
    eps: float,
    *,
    padded: int | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only for arguments that ``misfit`` accepts.

    With ``padded`` (rows that the scales have) it is add_rms_norm_rounded. ``interpret``:
    plgpu.InterpretGPUParams, for tests.
    """
    num_splits, hidden = len(partials), x.shape[-1]
    rows = x.size // hidden
    # The same layout for all dtypes; the default depends on the dtype.
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=math.gcd(hidden // THREADS, 4))

    @fixed_name(interpret)
    def add_rms_norm_kernel(x_ref, partials_ref, weight_ref, total_ref, *normed_refs):
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
        normed = (wide * scale).astype(x.dtype) * scales
        if padded is None:
            [normed_ref] = normed_refs
            normed_ref[row] = normed
        else:
            rounded_ref, step_ref = normed_refs
            step = scale_of(jnp.max(jnp.abs(normed.astype(jnp.float32))))
            rounded_ref[row] = rounded_by(normed.astype(jnp.float32), step)
            step_ref[0, row] = step

    flat = jax.ShapeDtypeStruct((rows, hidden), x.dtype)
    rounded = (
        jax.ShapeDtypeStruct((rows, hidden), FLOAT8),
        jax.ShapeDtypeStruct((1, padded or 0), jnp.float32),
    )
    kernel = plgpu.kernel(
        add_rms_norm_kernel,
        out_type=(flat, flat) if padded is None else (flat, *rounded),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    total, normed, *steps = kernel(
        x.reshape(rows, hidden), partials.reshape(num_splits, -1, hidden), weight
    )
    return total.reshape(x.shape), normed.reshape(x.shape), *steps
