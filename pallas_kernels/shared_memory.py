"""Writes to swizzled tiles in the shared memory of Hopper GPUs, below the level of Pallas."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

THREADS = 128  # of a warpgroup
TILE_ROWS = 8
LINE = 128  # bytes of a row in one tile; the swizzle permutes bytes within a line
STORE = 16  # bytes that a thread writes at once

_tiling = plgpu.TilingTransform((TILE_ROWS, 64))  # pyright: ignore[reportAbstractUsage]
SWIZZLED = (_tiling, plgpu.SwizzleTransform(LINE))  # pyright: ignore[reportAbstractUsage]


def swizzled_bytes(width: int) -> tuple[Any, ...]:
    """Transforms of rows [n, width] of 8-bit numbers; ``width`` is 64, 128 or a multiple of 128."""
    line = min(width, LINE)
    tiling = plgpu.TilingTransform((TILE_ROWS, line))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(line)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle


def zero_rows_outside(ref: Any, first: Array, end: Array, *, interpret: bool) -> None:
    """Overwrite the rows before ``first`` and from ``end`` on with zeros, in one warpgroup.

    The caller must call ``plgpu.commit_smem`` afterwards. Assignments through Pallas are not used:
    each would load its rows and synchronize the warpgroup before and after.

    Args:
      ref: 16-bit rows [n, D], laid out SWIZZLED; D a multiple of 64.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        row = jnp.arange(ref.shape[0])[:, None]
        ref[...] = jnp.where((row >= first) & (row < end), ref[...], jnp.zeros((), ref.dtype))
        return
    num_rows, width = ref.shape

    def emit(_: Any, tiles: Any, first: Any, end: Any) -> None:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        first, end = first.registers.item(), end.registers.item()
        thread = arith.remui(mgpu.thread_idx(), utils.c(THREADS, i32))
        start = utils.memref_ptr(tiles)
        zeros = utils.c(0, ir.VectorType.get((STORE // 4,), i32))
        # Tiles are contiguous in memory. The tiles of the same rows follow one another.
        line = arith.divui(thread, utils.c(LINE // STORE, i32))
        tile, row_of_tile = (
            operation(line, utils.c(TILE_ROWS, i32)) for operation in (arith.divui, arith.remui)
        )
        lines = THREADS * STORE // LINE  # written by the warpgroup in one step
        tiles_of_row = 2 * width // LINE
        for step in range(num_rows * tiles_of_row // lines):
            at = arith.addi(tile, utils.c(step * lines // TILE_ROWS, i32))
            row = arith.divui(at, utils.c(tiles_of_row, i32))
            row = arith.addi(arith.muli(row, utils.c(TILE_ROWS, i32)), row_of_tile)
            before = arith.cmpi(arith.CmpIPredicate.slt, row, first)
            past = arith.cmpi(arith.CmpIPredicate.sge, row, end)
            offset = arith.addi(
                arith.muli(thread, utils.c(STORE, i32)), utils.c(step * THREADS * STORE, i32)
            )
            with mgpu.when(arith.ori(before, past)):
                llvm.store(zeros, utils.getelementptr(start, [offset], i8))

    scalar = plgpu.Layout.WG_SPLAT(())
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), scalar, scalar))(emit)
    inlined(ref, first, end)


def swizzled(columns: int, bits: int) -> tuple[Any, ...]:
    """Transforms of a matrix for the tensor cores: tiles of 8 rows and ``columns`` entries."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(columns * bits // 8)
