"""Rounding of rows to 8-bit floats on Hopper GPUs: up to four warpgroups per row."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.activations import units_of
from pallas_kernels.kernel_names import fixed_name
from pallas_kernels.round_tokens.reference import FLOAT8, rounded_by, scale_of
from pallas_kernels.row_parts import THREAD_NAME, RowParts, row_parts


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("padded", "parts", "interpret"))
def round_tokens_mosaic(
    x: Array, padded: int, *, parts: RowParts | None = None, interpret: Any = None
) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_tokens; only for rows that ``misfit`` accepts.

    ``parts`` None: as row_parts says. ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    rows, width = x.shape
    parts = parts or row_parts(width)

    @fixed_name(interpret)
    def round_tokens_kernel(x_ref, rounded_ref, scale_ref, **refs):
        row = lax.axis_index("row")
        own = parts.load(x_ref.at[row]).astype(jnp.float32)
        store_rounded(parts, own, row, rounded_ref, scale_ref, refs["largest"], interpret)

    return _kernel(round_tokens_kernel, parts, rows, padded, interpret)(x)


@functools.partial(jax.jit, static_argnames=("padded", "parts", "interpret"))
def round_gated_mosaic(
    gate_up: Array, padded: int, *, parts: RowParts | None = None, interpret: Any = None
) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_gated, and ``round_tokens_mosaic``."""
    rows, _, width = gate_up.shape
    parts = parts or row_parts(width)

    @fixed_name(interpret)
    def round_gated_kernel(gate_up_ref, rounded_ref, scale_ref, **refs):
        row = lax.axis_index("row")
        gate, up = (parts.load(gate_up_ref.at[row, i]).astype(jnp.float32) for i in (0, 1))
        units = units_of(gate, up, None, _sigmoid).astype(gate_up.dtype)
        store_rounded(parts, units.astype(jnp.float32), row, rounded_ref, scale_ref, refs["largest"], interpret)

    return _kernel(round_gated_kernel, parts, rows, padded, interpret)(gate_up)


def store_rounded(
    parts: RowParts,
    own: Array,
    row: Array,
    rounded_ref: Any,
    scale_ref: Any,
    scratch: Any,
    interpret: Any = None,
) -> None:
    """Round the warpgroup's part of a row, float32, by the scale of the whole row.

    ``scratch``: parts.scratch(interpret)'s.
    """
    scale = scale_of(parts.largest(jnp.abs(own), scratch, interpret))
    rounded_ref[row, parts.own()] = rounded_by(own, scale)

    @pl.when(lax.axis_index(THREAD_NAME) == 0)
    def _store_scale():
        scale_ref[0, row] = scale


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


def _kernel(body: Any, parts: RowParts, rows: int, padded: int, interpret: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, parts.width), FLOAT8),
            jax.ShapeDtypeStruct((1, padded), jnp.float32),
        ),
        scratch_types={"largest": parts.scratch(interpret)},
        grid=(rows,),
        grid_names=("row",),
        num_threads=parts.warpgroups,
        thread_name=THREAD_NAME,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
