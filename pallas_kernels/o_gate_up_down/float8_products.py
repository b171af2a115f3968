"""Products of a block of weights and rows, both of 8-bit floats, of one warpgroup of Hopper GPUs.

They are those of single warps with 32 inputs, to which Hopper's tensor cores come by way of
float16: sums are exact to float32. Sums, and the group of inputs that each warp has, are those of
products.py.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.o_gate_up_down.plan import BLOCK, GROUP, ROWS, TILE, TILES, WARPS
from pallas_kernels.o_gate_up_down.products import (
    SUMS,
    array_of,
    by_output,
    entry_chunk,
    f32,
    line_chunk,
    load_f32,
    tiles_of,
)
from pallas_kernels.shared_memory import LINE, swizzled
from pallas_kernels.warp_products import load_matrices, multiply_add_float8, shared_address
from pallas_kernels.words import Word

TRANSFORMS = swizzled(LINE, 8)  # of weights, and of rows
_CHUNK = 16  # entries, and bytes
_LINES = BLOCK // LINE  # of an output
_STEPS = GROUP // 32


def add_block(
    values: Any, factors: list[Any], x: Any, start: Array, total: Array, *, interpret: bool
) -> Array:
    """total + the sums of a block; scales multiply a job's sums when these are stored.

    Args:
      values: e4m3 [TILES, TILE, BLOCK], laid out as TRANSFORMS.
      factors: none.
      x: e4m3 [ROWS, ...], laid out as TRANSFORMS; the block's inputs begin at ``start``.
    """
    assert not factors
    if interpret:  # the interpreter does not support inlined MLIR
        return total + _sums_interpreted(values, x, start).reshape(SUMS)
    return _inlined(values, factors, x, start, total)


def add_scaled_block(
    values: Any, factors: list[Any], x: Any, start: Array, total: Array, *, interpret: bool
) -> Array:
    """``add_block`` where groups of inputs have scales: of weights [WARPS, TILES, TILE], and of
    rows, float32 [ROWS, ...]."""
    if interpret:
        of_weights, of_rows = (factor[...].astype(jnp.float32) for factor in factors)
        of_rows = lax.dynamic_slice(of_rows, (0, lax.div(start, GROUP)), (ROWS, WARPS))
        sums = _sums_interpreted(values, x, start) * of_weights.transpose(0, 2, 1)[..., None]
        return total + (sums * of_rows.T[:, None, None]).reshape(SUMS)
    return _inlined(values, factors, x, start, total)


def _sums_interpreted(values: Any, x: Any, start: Array) -> Array:
    """[WARPS, TILE, TILES, ROWS]"""
    weights = values[...].astype(jnp.float32).reshape(TILES, TILE, WARPS, GROUP)
    rows = lax.dynamic_slice(x[...], (0, start), (ROWS, BLOCK)).astype(jnp.float32)
    return jnp.einsum("towk,rwk->wotr", weights, rows.reshape(ROWS, WARPS, GROUP))


def _inlined(values: Any, factors: list[Any], x: Any, start: Array, total: Array) -> Array:
    refs = [plgpu.RefType(TRANSFORMS)] * 2 + [plgpu.RefType()] * len(factors)
    result: Any = plgpu.ShapeDtypeStruct(SUMS, jnp.dtype("float32"), layout=plgpu.Layout.WGMMA)
    types = plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WGMMA, *refs
    inlined: Any = plgpu.inline_mgpu(arg_types=types, return_type=result)
    return inlined(_emit)(start, total, values, x, *factors)


def _emit(_: Any, start: Any, total: Any, values: Any, x: Any, *factors: Any) -> Any:
    lane, warp = Word(mgpu.thread_idx()) % 32, Word(utils.warp_idx(sync=True)) % WARPS
    values, x = shared_address(values), shared_address(x)
    first = Word(start.registers.item()) // _CHUNK
    loads = [load_matrices(x + row_chunk(lane, first, warp, at)) for at in range(_STEPS // 2)]
    columns = [words for load in loads for words in (load[:2], load[2:])]
    sums = tiles_of(total)
    of_rows = _scales_of_rows(factors[1], start, lane, warp) if factors else []
    for tile in range(TILES):
        product = [utils.c(0.0, f32())] * 4 if factors else sums[tile]
        for step, column in enumerate(columns):
            words = load_matrices(values + weight_chunk(lane, warp, tile, step))
            product = multiply_add_float8(product, words, column)
        sums[tile] = product
        if factors:
            of_weights = by_output(factors[0], lane, warp, tile)
            scales = [arith.mulf(of_weights[at // 2], of_rows[at % 2]) for at in range(4)]
            before = tiles_of(total)[tile]
            sums[tile] = list(map(llvm.intr_fma, product, scales, before))
    return array_of(sums, total)


def _scales_of_rows(scales: Any, start: Any, lane: Word, warp: Word) -> list[Any]:
    """Those of a thread's two rows, for the group of its warp."""
    _, groups = ir.MemRefType(scales.type).shape
    group = Word(start.registers.item()) // GROUP + warp
    return [load_f32(scales, (lane % 4 * 2 + at) * groups + group) for at in range(2)]


# Where the 32 lanes of a warp find what ldmatrix loads: see products.py.


def weight_chunk(lane: Any, warp: Any, tile: int, step: int) -> Any:
    """Two chunks of 16 inputs, one after the other, of the first 8 outputs of a tile and of the
    other 8."""
    line = (lane // 8 % 2 + 2 * tile) * _LINES + warp
    return line_chunk(line, lane % 8, lane // 16 + 2 * step)


def row_chunk(lane: Any, first: Any, warp: Any, pair: int) -> Any:
    """Four chunks of 16 inputs of all rows; ``first``: the block's first chunk."""
    return entry_chunk(lane % 8, first + warp * (GROUP // _CHUNK) + (lane // 8 + 4 * pair))
