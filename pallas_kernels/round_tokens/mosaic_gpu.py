"""Rounding of rows to 8-bit floats on Hopper GPUs.

A warpgroup rounds a row that is there already. Hidden units, which are computed first, are shared
by up to four warpgroups: with one of them, plain rounds with 8-bit floats took 1 % longer on an
H100 than with a launch for the units and one that rounds.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.activations import units_of
from pallas_kernels.float8 import FLOAT8
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.round_tokens.group_parts import group_scales
from pallas_kernels.round_tokens.reference import GROUP, rounded_by, scale_of
from pallas_kernels.round_tokens.row_parts import THREAD_NAME, RowParts, row_parts


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("padded", "interpret"))
def round_tokens_mosaic(x: Array, padded: int, *, interpret: Any = None) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_tokens; only for rows that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    rows, width = x.shape
    parts = RowParts(width, warpgroups=1)

    @fixed_name(interpret)
    def round_tokens_kernel(x_ref, rounded_ref, scale_ref, largest):
        row = kernel_axes.index("row")
        part = parts.load(x_ref.at[row]).astype(jnp.float32)
        scale = scale_of(parts.largest(jnp.abs(part), largest, interpret))
        _store(parts, row, part, scale, rounded_ref, scale_ref)

    return _kernel(round_tokens_kernel, parts, rows, padded, interpret)(x)


@functools.partial(jax.jit, static_argnames=("padded", "interpret"))
def round_groups_mosaic(x: Array, padded: int, *, interpret: Any = None) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_tokens, for groups of 128, and
    ``round_tokens_mosaic``."""
    rows, width = x.shape
    parts = RowParts(width, warpgroups=1)

    @fixed_name(interpret)
    def round_groups_kernel(x_ref, rounded_ref, scale_ref, largest):
        row = kernel_axes.index("row")
        part = parts.load(x_ref.at[row]).astype(jnp.float32)
        scale = group_scales(parts, part, scale_ref, row, interpret)
        rounded_ref[row, parts.slice_of_part()] = rounded_by(part, scale)

    groups = width // GROUP
    return _kernel(round_groups_kernel, parts, rows, padded, interpret, groups)(x)


@functools.partial(jax.jit, static_argnames=("padded", "interpret"))
def round_gated_mosaic(
    gate_up: Array, padded: int, *, interpret: Any = None
) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_gated, and ``round_tokens_mosaic``."""
    rows, _, width = gate_up.shape
    parts = row_parts(width)

    @fixed_name(interpret)
    def round_gated_kernel(gate_up_ref, rounded_ref, scale_ref, largest):
        row = kernel_axes.index("row")
        gate, up = (parts.load(gate_up_ref.at[row, index]) for index in range(2))
        units = units_of(gate.astype(jnp.float32), up.astype(jnp.float32), None, _sigmoid)
        part = units.astype(gate_up.dtype).astype(jnp.float32)
        scale = scale_of(parts.largest(jnp.abs(part), largest, interpret))
        _store(parts, row, part, scale, rounded_ref, scale_ref)

    return _kernel(round_gated_kernel, parts, rows, padded, interpret)(gate_up)


def _store(
    parts: RowParts, row: Array, part: Array, scale: Array, rounded_ref: Any, scale_ref: Any
) -> None:
    rounded_ref[row, parts.slice_of_part()] = rounded_by(part, scale)

    @pl.when(kernel_axes.index(THREAD_NAME) == 0)
    def _store_scale():
        scale_ref[0, row] = scale


def _sigmoid(x: Array) -> Array:
    root = lax.rsqrt(1 + jnp.exp(-x))  # one instruction, other than a division
    return root * root


def _kernel(
    body: Any, parts: RowParts, rows: int, padded: int, interpret: Any, groups: int = 1
) -> Any:
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, parts.width), FLOAT8),
            jax.ShapeDtypeStruct((groups, padded), jnp.float32),
        ),
        scratch_types={"largest": parts.scratch(interpret)},
        grid=(rows,),
        grid_names=kernel_axes.names("row"),
        num_threads=parts.warpgroups,
        thread_name=kernel_axes.name(THREAD_NAME),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
