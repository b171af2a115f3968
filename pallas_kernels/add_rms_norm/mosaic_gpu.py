"""Residual addition and norm on Hopper GPUs: up to four warpgroups per row.

Clusters of 2 to 8 blocks per row were slower on an H100 (48 rows of 4096: 3.6 to 4.1 us, against
3.5 us with one block).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.kernel_names import fixed_name
from pallas_kernels.products import total_f32
from pallas_kernels.round_tokens.mosaic_gpu import store_rounded
from pallas_kernels.round_tokens.reference import FLOAT8
from pallas_kernels.row_parts import THREAD_NAME, RowParts, row_parts


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "padded", "parts", "interpret"))
def add_rms_norm_mosaic(
    x: Array,  # [..., H]
    partials: Array,  # [S, ..., H]
    weight: Array,  # [H]
    eps: float,
    *,
    beside: Array | None = None,  # [1, R, H]
    padded: int | None = None,
    parts: RowParts | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See pallas_kernels.add_rms_norm.add_rms_norm; only for arguments that ``misfit`` accepts.

    With ``padded`` (rows that the scales have) it is add_rms_norm_rounded, without ``beside``.
    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    num_splits, hidden = len(partials), x.shape[-1]
    rows = x.size // hidden
    parts = parts or row_parts(hidden)

    @fixed_name(interpret)
    def add_rms_norm_kernel(*arrays, **refs):
        row = lax.axis_index("row")
        if beside is None:
            return norm_row(refs, row, *arrays)
        x_ref, partials_ref, weight_ref, beside_ref, total_ref, normed_ref = arrays

        @pl.when(row < rows)
        def _norm():
            norm_row(refs, row, x_ref, partials_ref, weight_ref, total_ref, normed_ref)

        @pl.when(row >= rows)
        def _copy():
            normed_ref[row, parts.own()] = parts.load(beside_ref.at[row - rows])

    def norm_row(refs, row, x_ref, partials_ref, weight_ref, total_ref, *normed_refs):
        own = parts.own()
        residual = parts.load(x_ref.at[row])
        added = [parts.load(partials_ref.at[split, row]) for split in range(num_splits)]
        scales = parts.load(weight_ref)
        y = total_f32(added).astype(x.dtype)  # rounded as an unsplit product is
        total = (residual.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
        total_ref[row, own] = total
        wide = total.astype(jnp.float32)  # from the rounded sum, as the reference does
        squares = parts.total(wide * wide, refs["squares"], interpret)
        normed = (wide * lax.rsqrt(squares / hidden + eps)).astype(x.dtype) * scales
        if padded is None:
            [normed_ref] = normed_refs
            normed_ref[row, own] = normed
        else:
            wide = normed.astype(jnp.float32)
            store_rounded(parts, wide, row, *normed_refs, refs["largest"], interpret)

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
        scratch_types=dict.fromkeys(("squares", "largest"), parts.scratch(interpret)),
        grid=(rows + num_beside,),
        grid_names=("row",),
        num_threads=parts.warpgroups,
        thread_name=THREAD_NAME,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    flat_x, flat_partials = x.reshape(rows, hidden), partials.reshape(num_splits, -1, hidden)
    if beside is not None:
        total, normed = kernel(flat_x, flat_partials, weight, beside[0])
        return total.reshape(x.shape), normed[None]
    total, normed, *steps = kernel(flat_x, flat_partials, weight)
    return total.reshape(x.shape), normed.reshape(x.shape), *steps
