"""Rounding of rows to 8-bit floats on Hopper GPUs: one warpgroup per row.

Two or four warpgroups per row were no faster on an H100 (27 November 2026).
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.activations import units_of
from pallas_kernels.kernel_names import fixed_name
from pallas_kernels.round_tokens.reference import FLOAT8, rounded_by, scale_of

THREADS = 128  # of a warpgroup


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("padded", "interpret"))
def round_tokens_mosaic(x: Array, padded: int, *, interpret: Any = None) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_tokens; only for rows that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests.
    """
    load = _loader(x.shape[-1])

    @fixed_name(interpret)
    def round_tokens_kernel(x_ref, rounded_ref, scale_ref):
        row = lax.axis_index("row")
        _store(load(x_ref.at[row]), row, rounded_ref, scale_ref)

    return _kernel(round_tokens_kernel, *x.shape, padded, interpret)(x)


@functools.partial(jax.jit, static_argnames=("padded", "interpret"))
def round_gated_mosaic(
    gate_up: Array, padded: int, *, interpret: Any = None
) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_gated, and ``round_tokens_mosaic``."""
    rows, _, width = gate_up.shape
    load = _loader(width)

    @fixed_name(interpret)
    def round_gated_kernel(gate_up_ref, rounded_ref, scale_ref):
        row = lax.axis_index("row")
        gate, up = (load(gate_up_ref.at[row, index]) for index in range(2))
        units = units_of(gate, up, None, _sigmoid).astype(gate_up.dtype)
        _store(units.astype(jnp.float32), row, rounded_ref, scale_ref)

    return _kernel(round_gated_kernel, rows, width, padded, interpret)(gate_up)


def _loader(width: int) -> Any:
    """A function that loads a row as float32."""
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
    return lambda ref: plgpu.load(ref, layout=layout).astype(jnp.float32)


def _store(x: Array, row: Array, rounded_ref: Any, scale_ref: Any) -> None:
    scale = scale_of(jnp.max(jnp.abs(x)))
    rounded_ref[row] = rounded_by(x, scale)
    scale_ref[0, row] = scale


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


def _kernel(body: Any, rows: int, width: int, padded: int, interpret: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, width), FLOAT8),
            jax.ShapeDtypeStruct((1, padded), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
