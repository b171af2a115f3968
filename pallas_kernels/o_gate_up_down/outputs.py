"""The outputs of a job from the parts of all warps, on Hopper GPUs, in one warpgroup.

A thread has the same output of both tiles, of one row.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.o_gate_up_down.plan import ROWS, TILE, TILES, WARPS, PhaseName
from pallas_kernels.words import Word

_LOG2_E = 1.4426950408889634


def store_job(
    name: PhaseName, parts: Any, result: Any, residual: Any, first: Array, *, interpret: bool
) -> None:
    """Store a job's outputs, of all rows of the result, from column ``first`` on.

    - "o": bfloat16 sums, added to ``residual``; the second tile follows the first.
    - "gate_up": SiLU of the first tile, times the second.
    - "down": float32 sums.

    Args:
      parts: float32 [warpgroups, *products.SUMS] in shared memory.
      result, residual: [rows, ...]
    """
    if interpret:  # the interpreter does not support inlined MLIR
        _store_interpreted(name, parts, result, residual, first)
        return
    plain: Any = plgpu.RefType()
    inlined: Any = plgpu.inline_mgpu(arg_types=(plain, plain, plain, plgpu.Layout.WG_SPLAT(())))
    inlined(functools.partial(_emit, name=name))(parts, result, residual, first)


def _store_interpreted(name: PhaseName, parts: Any, result: Any, residual: Any, first: Any) -> None:
    rows = result.shape[0]
    by_warp = parts[...].reshape(-1, TILE, TILES, ROWS)
    sums = by_warp.sum(0).transpose(2, 1, 0)[:rows]  # [rows, TILES, TILE]
    columns = pl.ds(first, TILE if name == "gate_up" else TILES * TILE)
    rounded = sums.astype(jnp.bfloat16)
    if name == "gate_up":
        gate, up = (rounded[:, tile].astype(jnp.float32) for tile in range(TILES))
        result[:, columns] = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
    elif name == "o":
        result[:, columns] = residual[:, columns] + rounded.reshape(rows, -1)
    else:
        result[:, columns] = sums.reshape(rows, -1)


def _emit(_: Any, parts: Any, result: Any, residual: Any, first: Any, *, name: PhaseName) -> None:
    thread, first = Word(mgpu.thread_idx()) % 128, Word(first.registers.item())
    output, row = thread // ROWS, thread % ROWS
    rows, width = ir.MemRefType(result.type).shape
    strides, _ = ir.MemRefType(result.type).get_strides_and_offset()
    assert strides == [width, 1]
    tiles = 1 if name == "gate_up" else TILES
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row.value, _word(rows))):
        places = [row * width + first + (output + TILE * tile) for tile in range(tiles)]
        # On its way while the sums are made.
        stream = [_load_bf16(residual, place) for place in places] if name == "o" else None
        sums = _sums(parts, output, row)
        if name == "gate_up":
            sums = [_gated(*map(_rounded, sums))]
        for at, (place, total) in enumerate(zip(places, sums, strict=True)):
            if stream is not None:
                total = arith.addf(stream[at], _rounded(total))
            stored = total if name == "down" else arith.truncf(_bf16(), total)
            llvm.store(stored, _entry(result, place), alignment=4 if name == "down" else 2)


def _load_bf16(ref: Any, place: Word) -> Any:
    """In float32."""
    return arith.extf(_f32(), llvm.load(_bf16(), _entry(ref, place), alignment=2))


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
