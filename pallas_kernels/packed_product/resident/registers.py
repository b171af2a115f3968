"""Operands of matrix products, below the level of Pallas: see places.py for what lies where."""

import itertools
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

from pallas_kernels.packed_product.resident.places import (
    BIAS,
    LINE,
    PIECE,
    SPAN,
    unpacked,
    weight_offsets,
    x_offsets,
    x_pieces,
    x_span,
    x_steps,
)
from pallas_kernels.packed_product.resident.tuning import BLOCK, TILE

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

    def emit(_: Any, tiles: Any) -> Any:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((TILE, unit)), dtype=object)
        # By span, by 8 places of it, then by row.
        by_span = registers.reshape(unit // SPAN, 4, 2)
        pointer = utils.memref_ptr(tiles)
        offsets = weight_offsets(_Word(mgpu.thread_idx()), start, unit, ref.shape[1] // BLOCK)
        for index, offset in enumerate(offsets):
            word = llvm.load(i32, utils.getelementptr(pointer, [offset.value], i8))
            for c, bits in enumerate(unpacked(_Word(word))):
                by_span[index // 2, c, index % 2] = utils.bitcast(bits.value, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result: Any = plgpu.ShapeDtypeStruct(
        (TILE, unit), jnp.dtype("bfloat16"), layout=plgpu.Layout.WGMMA
    )
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

    def emit(_: Any, source: Any, tiles: Any, start: Any) -> None:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        four = ir.VectorType.get((4,), i32)
        begin, thread = _Word(start.registers.item()), _Word(mgpu.thread_idx())
        gmem, smem = utils.memref_ptr(source), utils.memref_ptr(tiles)

        def load(row: _Word, span: _Word) -> list[list[_Word]]:
            element = row.at_most(num_rows - 1) * depth + begin + span * SPAN
            pointer = utils.getelementptr(gmem, [(element * 2).value], i8)
            pieces = [
                llvm.load(four, utils.getelementptr(pointer, [PIECE * t], i8)) for t in range(4)
            ]
            return [
                [_Word(llvm.extractelement(piece, utils.c(i, i32))) for i in range(4)]
                for piece in pieces
            ]

        def store(row: _Word, span: _Word, words: list[list[_Word]]) -> None:
            offsets = x_offsets(row, span, unit, padded)
            for offset, piece in zip(offsets, x_pieces(words), strict=True):
                vector = llvm.mlir_undef(four)
                for i, word in enumerate(piece):
                    vector = llvm.insertelement(vector, word.value, utils.c(i, i32))
                llvm.store(vector, utils.getelementptr(smem, [offset.value], i8))

        steps = [
            x_span(thread, step, threads, spans, padded, _Word.at_most)
            for step in range(x_steps(threads, spans, padded))
        ]
        for some in itertools.batched(steps, LOADS_IN_FLIGHT):
            loaded = [load(*one) for one in some]
            for one, words in zip(some, loaded, strict=True):
                store(*one, words)

    types = (plgpu.RefType(), plgpu.RefType(x_layout(unit)), plgpu.Layout.WG_SPLAT(()))
    inlined: Any = plgpu.inline_mgpu(arg_types=types)(emit)
    inlined(x, ref, start)


class _Word:
    """A register of 32 bits with the operators that places.py uses; numbers are unsigned."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: Any) -> "_Word":
        return self._with(arith.addi, other)

    def __mul__(self, other: Any) -> "_Word":
        return self._with(arith.muli, other)

    def __floordiv__(self, other: Any) -> "_Word":
        return self._with(arith.divui, other)

    def __mod__(self, other: Any) -> "_Word":
        return self._with(arith.remui, other)

    def __and__(self, other: Any) -> "_Word":
        return self._with(arith.andi, other)

    def __or__(self, other: Any) -> "_Word":
        return self._with(arith.ori, other)

    def __xor__(self, other: Any) -> "_Word":
        return self._with(arith.xori, other)

    def __lshift__(self, other: Any) -> "_Word":
        return self._with(arith.shli, other)

    def __rshift__(self, other: Any) -> "_Word":
        return self._with(arith.shrui, other)

    def at_most(self, last: int) -> "_Word":
        return self._with(arith.minui, last)

    def _with(self, operation: Any, other: Any) -> "_Word":
        i32 = ir.IntegerType.get_signless(32)
        if isinstance(other, int):
            other = _Word(utils.c(other - (other >> 31 << 32), i32))
        return _Word(operation(self.value, other.value))
