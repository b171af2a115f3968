"""The outputs of a job from the parts of all warps, on Hopper GPUs, in one warpgroup."""

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

from pallas_kernels.expert_gate_up_down.plan import (
    OUTPUTS,
    ROWS,
    TILE,
    UNITS,
    WARPGROUPS,
    WARPS,
)
from pallas_kernels.expert_gate_up_down.products import SPAN, unit_place
from pallas_kernels.words import Word

THREADS = 128  # of a warpgroup
_LOG2_E = 1.4426950408889634


def store_units(parts: Any, units: Any, first: Array, *, rows: int, interpret: bool) -> None:
    """Store SiLU of gate, times up, of a job of so many rows.

    Args:
      parts: float32 [WARPGROUPS, *products.SUMS] in shared memory. Of each warp: UNITS of gate,
        then those of up.
      units: bfloat16 [n, ROWS, SPAN], as products.unit_place says. Other rows stay as they are.
      first: the job's first unit among those of all slots.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        sums = parts[...].reshape(-1, 2, UNITS, ROWS).sum(0)[..., :rows]
        found = (jax.nn.silu(sums[0]) * sums[1]).astype(jnp.bfloat16)  # [UNITS, rows]
        for unit in range(0, UNITS, 2):  # pairs of units stay side by side
            column = unit_place(first + unit, 0) % SPAN
            units[first // SPAN, :rows, pl.ds(column, 2)] = found[unit : unit + 2].T
        return
    _inlined(functools.partial(_emit_units, rows=rows))(parts, units, first)


def store_products(
    parts: Any, products: Any, slot: Array, first: Array, *, rows: int, interpret: bool
) -> None:
    """Store the outputs of a job of down, from column ``first`` on, of so many of a slot's lanes.

    Args:
      parts: float32 [WARPGROUPS, *products.SUMS] in shared memory, TILE outputs of each warpgroup.
      products: float32 [slots * ROWS, H].
    """
    if interpret:
        sums = parts[...].reshape(WARPGROUPS, WARPS, TILE, ROWS).sum(1).reshape(OUTPUTS, ROWS)
        products[pl.ds(slot * ROWS, rows), pl.ds(first, OUTPUTS)] = sums.T[:rows]
        return
    _inlined(functools.partial(_emit_products, rows=rows))(parts, products, slot, first)


def _inlined(emit: Any) -> Any:
    def call(parts: Any, result: Any, *numbers: Any) -> None:
        types = [plgpu.RefType()] * 2 + [plgpu.Layout.WG_SPLAT(())] * len(numbers)
        inlined: Any = plgpu.inline_mgpu(arg_types=tuple(types))
        inlined(emit)(parts, result, *numbers)

    return call


def _emit_units(_: Any, parts: Any, units: Any, first: Any, *, rows: int) -> None:
    thread = Word(mgpu.thread_idx()) % THREADS
    unit, row = thread // ROWS, thread % ROWS
    count, begin = WARPGROUPS * WARPS, Word(first.registers.item())
    with mgpu.when(arith.andi(_less(unit, UNITS), _less(row, rows))):
        first_part = unit * ROWS + row
        gate, up = (_sum(parts, first_part + half * UNITS * ROWS, count) for half in range(2))
        rounded = arith.truncf(ir.BF16Type.get(), _gated(gate, up))
        place = unit_place(begin + unit, row)
        llvm.store(rounded, _entry(units, place), alignment=2)


def _emit_products(_: Any, parts: Any, products: Any, slot: Any, first: Any, *, rows: int) -> None:
    thread = Word(mgpu.thread_idx()) % THREADS
    _, width = ir.MemRefType(products.type).shape
    slot, first = (Word(number.registers.item()) for number in (slot, first))
    output = thread % OUTPUTS
    for start in range(0, rows, THREADS // OUTPUTS):
        row = thread // OUTPUTS + start
        with mgpu.when(_less(row, rows)):
            of_warpgroup = output // TILE * (WARPS * TILE * ROWS)
            total = _sum(parts, of_warpgroup + output % TILE * ROWS + row, WARPS)
            place = (slot * ROWS + row) * width + first + output
            llvm.store(total, _entry(products, place), alignment=4)


def _sum(parts: Any, first: Word, count: int) -> Any:
    """The sum of an entry over so many warps, in order; ``first``: where that of the first is."""
    places = [first + warp * TILE * ROWS for warp in range(count)]
    terms = [llvm.load(ir.F32Type.get(), _entry(parts, at), alignment=4) for at in places]
    return functools.reduce(arith.addf, terms)


def _gated(gate: Any, up: Any) -> Any:
    """SiLU of gate, times up."""
    power = arith.mulf(gate, utils.c(-_LOG2_E, ir.F32Type.get()))
    exponential = utils.inline_ptx("ex2.approx.f32 $0, $1;", power, result_types=ir.F32Type.get())
    divisor = arith.addf(utils.c(1.0, ir.F32Type.get()), exponential)
    return arith.mulf(arith.divf(gate, divisor), up)


def _less(word: Word, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, word.value, utils.c(bound, _i32()))


def _entry(ref: Any, place: Word) -> Any:
    """The address of an entry, counted from where the array begins."""
    dtype = ir.MemRefType(ref.type).element_type
    return utils.getelementptr(utils.memref_ptr(ref), [place.value], dtype)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
