"""From shared memory to the operands of matrix products, below the level of Pallas.

A register of 8 consecutive weights of 4 bits becomes 4 pairs of bfloat16 by a shift, a mask and a
constant exponent. So that no pair has to be moved to another thread, the inputs of each 32 are
multiplied in another order than they are stored: place ``8 c + 2 t + e`` of the product holds input
``8 t + 4 e + c``, for c and t in 0..3 and e in 0..1. Thread t of the four that share a row has the
8 weights from 8 t on; its pairs are its nibbles c and c + 4. Rows of x are stored to shared memory
in the same order.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.packed_product.tuning import BLOCK, TILE

SPAN = 32  # inputs that are reordered among themselves
BIAS = 136  # what is added to an integer of -8..7: 128, where bfloat16's step is 1, and 8
LANES = 32  # threads of a warp
LINE = 128  # bytes of a swizzled row of weights
LOADS_IN_FLIGHT = 4  # spans of x that a thread has requested before it stores the first one


def reordered(x: Array) -> Array:
    """The last axis in the order of the products: [..., K], K a multiple of 32."""
    by_place = x.reshape(*x.shape[:-1], -1, 4, 2, 4)  # t, e, c
    axes = range(x.ndim - 1)
    return by_place.transpose(*axes, x.ndim - 1, x.ndim + 2, x.ndim, x.ndim + 1).reshape(x.shape)


def weights_layout() -> tuple[Any, ...]:
    """How a block of weights [64, block] lies in shared memory."""
    tiling = plgpu.TilingTransform((8, BLOCK))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(LINE)  # pyright: ignore[reportAbstractUsage]


def x_layout(unit: int) -> tuple[Any, ...]:
    """How rows of x [*, N, unit] lie in shared memory; unit: 32 or 64."""
    tiling = plgpu.TilingTransform((8, unit))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(2 * unit)  # pyright: ignore[reportAbstractUsage]


def load_weights(ref: Any, start: int, unit: int, *, interpret: bool) -> Array:
    """Integers of a block plus BIAS, exact in bfloat16: [64, unit], reordered.

    Args:
      ref: int4 [64, block] in ``weights_layout``.
      start: first input; a multiple of 32, known when the kernel is built.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        integers = ref[...][:, start : start + unit].astype(jnp.bfloat16)
        return reordered(integers) + jnp.bfloat16(BIAS)
    tiles_of_row = ref.shape[1] // BLOCK

    def emit(_: Any, tiles: Any) -> Any:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        lane, warp = _lane_and_warp(i32)
        row = arith.shrui(lane, utils.c(2, i32))  # of 8 rows of a tile
        base = _sum(
            arith.muli(warp, utils.c(2 * tiles_of_row * 8 * LINE, i32)),
            arith.muli(row, utils.c(LINE, i32)),
            arith.muli(arith.andi(lane, utils.c(3, i32)), utils.c(4, i32)),
        )
        mask, exponent = utils.c(0x000F000F, i32), utils.c(0x43084308, i32)
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((TILE, unit)), dtype=object)
        flat = registers.reshape(-1)  # of 8 places each: rows from 0 on, rows from 8 on
        pointer = utils.memref_ptr(tiles)
        for span in range(unit // SPAN):
            tile, chunk = divmod(start // SPAN + span, BLOCK // SPAN)
            swizzled = arith.xori(row, utils.c(chunk, i32))
            offset = arith.addi(base, arith.muli(swizzled, utils.c(16, i32)))
            for half in range(2):
                fixed = (half * tiles_of_row + tile) * 8 * LINE
                at = arith.addi(offset, utils.c(fixed, i32))
                word = llvm.load(i32, utils.getelementptr(pointer, [at], i8))
                for c in range(4):
                    shifted = arith.shrui(word, utils.c(4 * c, i32)) if c else word
                    pair = arith.xori(arith.andi(shifted, mask), exponent)
                    vector = ir.VectorType.get((2,), ir.BF16Type.get())
                    flat[2 * (4 * span + c) + half] = utils.bitcast(pair, vector)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result: Any = plgpu.ShapeDtypeStruct((TILE, unit), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    inlined: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(weights_layout()),), return_type=result
    )(emit)
    return inlined(ref)


def store_x(
    x: Any, start: Array, ref: Any, *, threads: int, warpgroup: Array, interpret: bool
) -> None:
    """Store inputs of all rows to shared memory, reordered. Rows past the last one repeat it.

    The caller must call ``plgpu.commit_smem`` afterwards, and wait for the other warpgroups.

    Args:
      x: bfloat16 [M, in] in global memory.
      start: first input.
      ref: bfloat16 [in / unit, N, unit] in ``x_layout``.
      threads: of all warpgroups that take part, the first ones of the block.
      warpgroup: index of this warpgroup.
    """
    chunks, padded, unit = ref.shape
    if interpret:
        @pl.when(warpgroup == 0)
        def _():
            some = x[:, pl.ds(start, chunks * unit)]
            rows = jnp.concatenate([some] + [some[-1:]] * (padded - len(some)))
            ref[...] = reordered(rows).reshape(padded, chunks, unit).swapaxes(0, 1)
        return
    num_rows, depth = x.shape
    spans = chunks * unit // SPAN
    units = padded // 8 * spans  # spans of 8 rows
    at_once = threads // 8
    steps = -(-units // at_once)

    def emit(_: Any, source: Any, tiles: Any, start: Any) -> None:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        start = start.registers.item()
        thread = mgpu.thread_idx()
        low = arith.remui(thread, utils.c(8, i32))
        first = arith.divui(thread, utils.c(8, i32))
        gmem, smem = utils.memref_ptr(source), utils.memref_ptr(tiles)

        def place(step: int) -> tuple[Any, Any]:
            """Row group and span of this thread. Past the end: the last, with the same data."""
            index = arith.addi(first, utils.c(step * at_once, i32))
            index = arith.minui(index, utils.c(units - 1, i32))
            return tuple(op(index, utils.c(spans, i32)) for op in (arith.divui, arith.remui))

        def load(step: int) -> list[Any]:
            group, span = place(step)
            row = arith.addi(arith.muli(group, utils.c(8, i32)), low)
            row = arith.minui(row, utils.c(num_rows - 1, i32))
            element = _sum(
                arith.muli(row, utils.c(depth, i32)),
                start,
                arith.muli(span, utils.c(SPAN, i32)),
            )
            pointer = utils.getelementptr(gmem, [arith.muli(element, utils.c(2, i32))], i8)
            vector = ir.VectorType.get((4,), i32)
            pieces = [
                llvm.load(vector, utils.getelementptr(pointer, [16 * t], i8)) for t in range(4)
            ]
            return [[_word(piece, i) for i in range(4)] for piece in pieces]

        def store(step: int, words: list[Any]) -> None:
            group, span = place(step)
            chunk, part = (op(span, utils.c(unit // SPAN, i32)) for op in (arith.divui, arith.remui))
            base = _sum(
                arith.muli(chunk, utils.c(2 * padded * unit, i32)),
                arith.muli(group, utils.c(2 * 8 * unit, i32)),
                arith.muli(low, utils.c(2 * unit, i32)),
            )
            phase = low if unit == 64 else arith.divui(low, utils.c(2, i32))
            for c in range(4):
                # Pairs of inputs c and c + 4 of each 8: low or high halves of two words.
                order = utils.c(0x7632 if c % 2 else 0x5410, i32)
                pairs = [utils.prmt(piece[c // 2], piece[2 + c // 2], order) for piece in words]
                line = arith.addi(arith.muli(part, utils.c(4, i32)), utils.c(c, i32))
                line = arith.xori(line, phase)
                at = arith.addi(base, arith.muli(line, utils.c(16, i32)))
                llvm.store(_vector(pairs, i32), utils.getelementptr(smem, [at], i8))

        for begin in range(0, steps, LOADS_IN_FLIGHT):
            some = range(begin, min(begin + LOADS_IN_FLIGHT, steps))
            loaded = [load(step) for step in some]
            for step, words in zip(some, loaded, strict=True):
                store(step, words)

    types = (plgpu.RefType(), plgpu.RefType(x_layout(unit)), plgpu.Layout.WG_SPLAT(()))
    inlined: Any = plgpu.inline_mgpu(arg_types=types)(emit)
    inlined(x, ref, start)


def _lane_and_warp(i32: Any) -> tuple[Any, Any]:
    """Index of this thread in its warp, and of the warp in its warpgroup."""
    thread = mgpu.thread_idx()
    warp = arith.divui(thread, utils.c(LANES, i32))
    return (
        arith.remui(thread, utils.c(LANES, i32)),
        arith.remui(warp, utils.c(4, i32)),
    )


def _sum(*terms: Any) -> Any:
    return functools.reduce(arith.addi, terms)


def _word(vector: Any, index: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.extractelement(vector, utils.c(index, i32))


def _vector(words: list[Any], i32: Any) -> Any:
    vector = llvm.mlir_undef(ir.VectorType.get((len(words),), i32))
    for index, word in enumerate(words):
        vector = llvm.insertelement(vector, word, utils.c(index, i32))
    return vector
