"""The outputs of a job from the parts of all warps, on Hopper GPUs, in one warpgroup.

A thread has the same output of both tiles, of one row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.grid_barrier import gather
from pallas_kernels.o_gate_up_down.plan import ROWS, TILE, TILES, WARPS, PhaseName
from pallas_kernels.o_gate_up_down.products import load_f32
from pallas_kernels.words import Word

_LOG2_E = 1.4426950408889634


class Scales(NamedTuple):
    """What multiplies sums of rows that were rounded.

    Attributes:
      rows: float32 [ROWS] in shared memory.
      outputs: [V] in device memory.
      largest: float32 [ROWS] in shared memory, the largest magnitudes of units so far.
    """

    rows: Any
    outputs: Any
    largest: Any


def store_job(
    name: PhaseName,
    parts: Any,
    result: Any,
    residual: Any,
    first: Array,
    scales: Scales | None = None,
    *,
    interpret: bool,
) -> None:
    """Store a job's outputs, of all rows of the result, from column ``first`` on.

    - "o": bfloat16 sums, added to ``residual``; the second tile follows the first.
    - "gate_up": SiLU of the first tile, times the second.
    - "down": float32 sums.

    Args:
      parts: float32 [warpgroups, *products.SUMS] in shared memory.
      result, residual: [rows, ...]
      scales: None: sums are whole already.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        _store_interpreted(name, parts, result, residual, first, scales)
        return
    plain: Any = plgpu.RefType()
    scalar, factors = plgpu.Layout.WG_SPLAT(()), scales or ()
    types = plain, plain, plain, scalar, *[plain] * len(factors)
    inlined: Any = plgpu.inline_mgpu(arg_types=types)
    inlined(functools.partial(_emit, name=name))(parts, result, residual, first, *factors)


def _store_interpreted(
    name: PhaseName, parts: Any, result: Any, residual: Any, first: Any, scales: Scales | None
) -> None:
    (rows, width), tiles = result.shape, (TILES, TILE)
    by_warp = parts[...].reshape(-1, TILE, TILES, ROWS)
    sums = by_warp.sum(0).transpose(2, 1, 0)[:rows]  # [rows, TILES, TILE]
    columns = pl.ds(first, TILE if name == "gate_up" else TILES * TILE)
    if scales is not None:
        starts = [first + at * (width if name == "gate_up" else TILE) for at in range(TILES)]
        outputs = jnp.stack([scales.outputs[pl.ds(start, TILE)] for start in starts])
        sums *= scales.rows[...][:rows, None, None] * outputs.astype(jnp.float32).reshape(tiles)
    rounded = as_bfloat16(sums)
    if name == "gate_up":
        gate, up = (rounded[:, tile] for tile in range(TILES))
        units = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
        result[:, columns] = units
        if scales is not None:
            most = jnp.max(jnp.abs(units.astype(jnp.float32)), axis=-1)
            scales.largest[:rows] = jnp.maximum(scales.largest[:rows], most)
    elif name == "o":
        added = rounded.reshape(rows, -1).astype(jnp.bfloat16)
        result[:, columns] = residual[:, columns] + added
    else:
        result[:, columns] = sums.reshape(rows, -1)


def as_bfloat16(x: Array) -> Array:
    """Float32 numbers rounded to those of bfloat16, which XLA may not leave out."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _emit(
    _: Any, parts: Any, result: Any, residual: Any, first: Any, *factors: Any, name: PhaseName
) -> None:
    thread, first = Word(mgpu.thread_idx()) % 128, Word(first.registers.item())
    output, row = thread // ROWS, thread % ROWS
    rows, width = ir.MemRefType(result.type).shape
    strides, _ = ir.MemRefType(result.type).get_strides_and_offset()
    assert strides == [width, 1]
    tiles = 1 if name == "gate_up" else TILES
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row.value, _word(rows))):
        places = [row * width + first + (output + TILE * tile) for tile in range(tiles)]
        # On its way while the sums are made.
        stream = [load_f32(residual, place) for place in places] if name == "o" else None
        scales = Scales(*factors) if factors else None
        step = width if name == "gate_up" else TILE
        outputs = [first + (output + step * tile) for tile in range(TILES)]
        found = [load_f32(scales.outputs, at) for at in outputs] if scales else []
        sums = _sums(parts, output, row)
        if scales:
            of_row = load_f32(scales.rows, row)
            sums = [
                arith.mulf(total, arith.mulf(of_row, of_output))
                for total, of_output in zip(sums, found, strict=True)
            ]
        if name == "gate_up":
            sums = [_gated(*map(_rounded, sums))]
            if scales:
                _note_largest(scales.largest, row, _rounded(sums[0]))
        for at, (place, total) in enumerate(zip(places, sums, strict=True)):
            if stream is not None:
                total = arith.addf(stream[at], _rounded(total))
            stored = total if name == "down" else arith.truncf(_bf16(), total)
            llvm.store(stored, _entry(result, place), alignment=4 if name == "down" else 2)


def _note_largest(largest: Any, row: Word, unit: Any) -> None:
    """Magnitudes are numbers whose bits are in their order."""
    magnitude = arith.maximumf(unit, arith.negf(unit))
    bits = utils.bitcast(magnitude, ir.IntegerType.get_signless(32))
    place = (Word(llvm.ptrtoint(ir.IntegerType.get_signless(32), _entry(largest, row)))).value
    note = "red.shared.max.u32 [$0], $1;"
    utils.inline_ptx(note, place, bits, has_side_effects=True)


def clear_largest(largest: Any, *, interpret: bool) -> None:
    """Before the jobs of gate and up, in the warpgroup that stores them."""
    if interpret:
        largest[...] = jnp.zeros(ROWS, jnp.float32)
        return

    def emit(_: Any, largest: Any) -> None:
        thread = Word(mgpu.thread_idx()) % 128
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread.value, _word(ROWS))):
            llvm.store(utils.c(0.0, _f32()), _entry(largest, thread), alignment=4)
        gather()

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    inlined(emit)(largest)


def tell_largest(largest: Any, told: Any, block: Array, *, interpret: bool) -> None:
    """Store them where all thread blocks read them: float32 [blocks, ROWS]."""
    if interpret:
        told[block] = largest[...]
        return

    def emit(_: Any, largest: Any, told: Any, block: Any) -> None:
        gather()
        thread, block = Word(mgpu.thread_idx()) % 128, Word(block.registers.item())
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread.value, _word(ROWS))):
            value = load_f32(largest, thread)
            llvm.store(value, _entry(told, block * ROWS + thread), alignment=4)

    inlined: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))
    )
    inlined(emit)(largest, told, block)


def _sums(parts: Any, output: Word, row: Word) -> list[Any]:
    """The sums over all warps of all warpgroups, in order, of each tile."""
    count = ir.MemRefType(parts.type).shape[0] * WARPS
    sums = []
    for tile in range(TILES):
        place = output * (TILES * ROWS) + row + ROWS * tile
        places = [place + part * (TILE * TILES * ROWS) for part in range(count)]
        terms = [llvm.load(_f32(), _entry(parts, at), alignment=4) for at in places]
        sums.append(functools.reduce(arith.addf, terms))
    return sums


def _gated(gate: Any, up: Any) -> Any:
    """SiLU of gate, times up."""
    power = arith.mulf(gate, utils.c(-_LOG2_E, _f32()))
    exponential = utils.inline_ptx("ex2.approx.f32 $0, $1;", power, result_types=_f32())
    return arith.mulf(arith.divf(gate, arith.addf(utils.c(1.0, _f32()), exponential)), up)


def _entry(ref: Any, place: Word) -> Any:
    """The address of an entry, counted from where the array begins."""
    dtype = ir.MemRefType(ref.type).element_type
    return utils.getelementptr(utils.memref_ptr(ref), [place.value], dtype)


def _rounded(value: Any) -> Any:
    """To bfloat16, as results of a product are."""
    return arith.extf(_f32(), arith.truncf(_bf16(), value))


def _word(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _bf16() -> Any:
    return ir.BF16Type.get()


def _f32() -> Any:
    return ir.F32Type.get()
