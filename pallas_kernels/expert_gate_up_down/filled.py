"""The slots that have an expert, listed in shared memory by one warpgroup of a thread block."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.expert_gate_up_down.plan import Kind
from pallas_kernels.grid_barrier import gather
from pallas_kernels.words import Word

LANES = 32  # of a warp


def list_filled(experts: Any, lists: Sequence[Any], kind: Kind, *, interpret: bool) -> None:
    """List the slots that have an expert of a kind, in order, and their experts.

    Args:
      experts: int32 [S] of each slot, in device memory; more than there are for none.
      lists: in shared memory, int32 [S] the slots and [S] the numbers of their experts among those
        of the kind, and [1] how many there are. What stands behind the last one is not specified.
    """
    slots, of_slots, count = lists
    if interpret:  # the interpreter does not support inlined MLIR
        found = experts[...] - kind.first
        is_listed = (found >= 0) & (found < kind.count)
        order = jnp.argsort(~is_listed, stable=True).astype(jnp.int32)
        slots[...] = order
        of_slots[...] = found[order]
        count[...] = jnp.sum(is_listed, dtype=jnp.int32)[None]
        return
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
    inlined(functools.partial(_emit, kind=kind))(experts, slots, of_slots, count)


def _emit(_: Any, experts: Any, slots: Any, of_slots: Any, count: Any, *, kind: Kind) -> None:
    """All warps do the same, and write the same."""
    [size] = ir.MemRefType(experts.type).shape
    lane = Word(mgpu.thread_idx()) % LANES
    total = _word(0)
    for start in range(0, size, LANES):
        slot = lane + start
        place = Word(arith.minui(slot.value, _word(size - 1).value))
        expert = Word(llvm.load(_i32(), _entry(experts, place), alignment=4)) - kind.first
        has_expert = arith.cmpi(arith.CmpIPredicate.ult, expert.value, _word(kind.count).value)
        is_slot = arith.cmpi(arith.CmpIPredicate.ult, slot.value, _word(size).value)
        there = arith.andi(has_expert, is_slot)
        lanes = _ballot(there)
        before = _count(lanes & _below(lane))
        with mgpu.when(there):
            for ref, value in ((slots, slot.value), (of_slots, expert.value)):
                llvm.store(value, _entry(ref, total + before), alignment=4)
        total = total + _count(lanes)
    llvm.store(total.value, _entry(count, _word(0)), alignment=4)
    gather()


def _ballot(there: Any) -> Word:
    """A bit for each lane of the warp."""
    wide = arith.extui(_i32(), there)
    vote = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    how: Any = {"result_types": _i32(), "has_side_effects": True, "convergent": True}
    return Word(utils.inline_ptx(vote, wide, **how))


def _below(lane: Word) -> Word:
    """The bits of the lanes before."""
    bit = arith.shli(_word(1).value, lane.value)
    return Word(arith.subi(bit, _word(1).value))


def _count(bits: Word) -> Word:
    return Word(utils.inline_ptx("popc.b32 $0, $1;", bits.value, result_types=_i32()))


def _entry(ref: Any, place: Word) -> Any:
    return utils.getelementptr(utils.memref_ptr(ref), [place.value], _i32())


def _word(value: int) -> Word:
    return Word(utils.c(value, _i32()))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
