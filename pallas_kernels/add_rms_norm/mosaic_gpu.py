"""Residual addition and norm on Hopper GPUs: one warpgroup per row.

Clusters of 2 to 8 blocks per row were slower on an H100 (48 rows of 4096: 3.6 to 4.1 us, against
3.5 us with one block).
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.float8 import FLOAT8
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.products import total_f32
from pallas_kernels.round_tokens.reference import rounded_by, scale_of

THREADS = 128  # of a warpgroup


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "padded", "interpret"))
def add_rms_norm_mosaic(
    x: Array,  # [..., H]
    partials: Array,  # [S, ..., H]
    weight: Array,  # [H]
    eps: float,
    *,
    beside: Array | None = None,  # [1, R, H]
    padded: int | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only for arguments that ``misfit`` accepts.

    With ``padded`` (rows that the scales have) it is add_rms_norm_rounded, without ``beside``.
    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    num_splits, hidden = len(partials), x.shape[-1]
    rows = x.size // hidden
    # The same layout for all dtypes; the default depends on the dtype.
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=math.gcd(hidden // THREADS, 4))

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout)

    @fixed_name(interpret)
    def add_rms_norm_kernel(*refs):
        row = kernel_axes.index("row")
        if beside is None:
            return norm_row(row, *refs)
        x_ref, partials_ref, weight_ref, beside_ref, total_ref, normed_ref = refs

        @pl.when(row < rows)
        def _norm():
            norm_row(row, x_ref, partials_ref, weight_ref, total_ref, normed_ref)

        @pl.when(row >= rows)
        def _copy():
            normed_ref[row] = load(beside_ref.at[row - rows])

    def norm_row(row, x_ref, partials_ref, weight_ref, total_ref, *normed_refs):
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

    num_beside = 0 if beside is None else beside.shape[1]
    flat, joined = (
        jax.ShapeDtypeStruct((rows + more, hidden), x.dtype) for more in (0, num_beside)
    )
    rounded = (
        jax.ShapeDtypeStruct((rows, hidden), FLOAT8),
        jax.ShapeDtypeStruct((1, padded or 0), jnp.float32),
    )
    kernel = plgpu.kernel(
        add_rms_norm_kernel,
        out_type=(flat, joined) if padded is None else (flat, *rounded),
        grid=(rows + num_beside,),
        grid_names=kernel_axes.names("row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    flat_x, flat_partials = x.reshape(rows, hidden), partials.reshape(num_splits, -1, hidden)
    if beside is not None:
        total, normed = kernel(flat_x, flat_partials, weight, beside[0])
        return total.reshape(x.shape), normed[None]
    total, normed, *steps = kernel(flat_x, flat_partials, weight)
    return total.reshape(x.shape), normed.reshape(x.shape), *steps
