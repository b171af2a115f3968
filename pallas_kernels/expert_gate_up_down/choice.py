"""Which experts few rows go through, of their logits, on Hopper GPUs: every thread block finds all
choices by itself, in one warpgroup.

A warp has a row at a time, and its lanes four logits of every 128. Lanes find the largest one
together, as often as experts are chosen: floats are compared as integers of the same order.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.expert_gate_up_down.plan import ROWS, WARPS, RouterPlan
from pallas_kernels.expert_slots import make_slots
from pallas_kernels.grid_barrier import gather
from pallas_kernels.top_k.routes import LEAST_SUM, expert_routes_reference
from pallas_kernels.words import Word

LANES = 32
THREADS = LANES * WARPS
SIDE_BY_SIDE = 4  # logits of a lane
RESULTS = ("weights", "places")
_LOG2_E = 1.4426950408889634
_SIGN, _MAGNITUDE = 0x80000000, 0x7FFFFFFF  # bits of a float
_NONE = 0xFFFFFFFF


def choose(plan: RouterPlan, refs: dict[str, Any], block: Array, *, interpret: bool) -> None:
    """Write the expert of each slot to shared memory; the first thread block writes results.

    ``refs``, of N rows that choose K experts, the shared one included:
      logits: float32 [N, ...] in device memory.
      is_row: int32 [N] in device memory; others choose none.
      pairs, of_slots: int32 [N * K] in shared memory; the former is used on the way.
      weights, places: [N, K] in device memory, as of top_k.routes.expert_routes_in_slots.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        _choose_interpreted(plan, refs, block)
        return
    names = "logits", "is_row", "pairs", "of_slots", *RESULTS
    types = (*[plgpu.RefType()] * len(names), plgpu.Layout.WG_SPLAT(()))
    inlined: Any = plgpu.inline_mgpu(arg_types=types)
    inlined(functools.partial(_emit, plan=plan))(*(refs[name] for name in names), block)


def _choose_interpreted(plan: RouterPlan, refs: dict[str, Any], block: Array) -> None:
    logits, is_row, rule = refs["logits"][...], refs["is_row"][...] > 0, plan.rule
    chosen, weights = expert_routes_reference(logits[None, :, : plan.experts], is_row, rule, None)
    if rule.has_shared and plan.logits > plan.experts:
        shared = 1 / (1 + jnp.exp(-logits[:, plan.experts]))
        weights = weights.at[:, -1].set(shared)
    slots = make_slots(chosen, plan.experts + rule.has_shared)
    refs["of_slots"][...] = slots.expert
    if "places" not in refs:  # of a later phase
        return

    @pl.when(block == 0)
    def _():
        refs["weights"][...] = weights
        refs["places"][...] = jnp.where(is_row[:, None], slots.places, -1)


def _emit(
    _: Any,
    logits: Any,
    is_row: Any,
    pairs: Any,
    of_slots: Any,
    *results_and_block: Any,
    plan: RouterPlan,
) -> None:
    weights, places, block = results_and_block
    rows, width = ir.MemRefType(logits.type).shape
    count, thread = plan.count, Word(mgpu.thread_idx()) % THREADS
    lane, warp = thread % LANES, Word(utils.warp_idx(sync=True)) % WARPS
    is_first_block = _equal(Word(block.registers.item()), 0)
    for turn in range(-(-rows // WARPS)):
        row = warp + turn * WARPS
        read = Word(arith.minui(row.value, _constant(rows - 1)))
        expert, weight = _of_row(plan, logits, read * width, lane)
        is_there = arith.cmpi(arith.CmpIPredicate.ne, _load(is_row, read, _i32()), _constant(0))
        expert = arith.select(is_there, expert, _constant(plan.experts + plan.rule.has_shared))
        with mgpu.when(arith.andi(_less(lane, count), _less(row, rows))):
            pair = row * count + lane
            _store(pairs, pair, expert)
            with mgpu.when(is_first_block):
                _store(weights, pair, weight)
    gather()
    with mgpu.when(_less(thread, rows * count)):
        expert, slot = _load(pairs, thread, _i32()), thread
        for pair in reversed(range(rows * count if rows > 1 else 0)):
            same = arith.cmpi(arith.CmpIPredicate.eq, _load(pairs, _word(pair), _i32()), expert)
            slot = Word(arith.select(same, _constant(pair), slot.value))
        none = _constant(plan.experts + plan.rule.has_shared)
        is_slot = arith.cmpi(arith.CmpIPredicate.eq, slot.value, thread.value)
        _store(of_slots, thread, arith.select(is_slot, expert, none))
        with mgpu.when(is_first_block):
            place = slot * ROWS + thread // count
            missing = arith.cmpi(arith.CmpIPredicate.eq, expert, none)
            _store(places, thread, arith.select(missing, _constant(_NONE), place.value))
    gather()


def _of_row(plan: RouterPlan, logits: Any, begin: Word, lane: Word) -> tuple[Any, Any]:
    """The expert of a lane's choice and its weight, for lanes below ``plan.count``."""
    places = [lane * SIDE_BY_SIDE + at for at in range(0, plan.experts, LANES * SIDE_BY_SIDE)]
    loaded = [_load_four(logits, begin + place) for place in places]
    experts = [place + at for place in places for at in range(SIDE_BY_SIDE)]
    values = [vector.extract(four, [], [at]) for four in loaded for at in range(SIDE_BY_SIDE)]
    keys = [_key(value) for value in values]
    key, expert, largest = _constant(0), _constant(plan.experts), None
    for choice in range(plan.rule.k):
        best = _redux("max", functools.reduce(arith.maxui, keys))
        candidates = [
            arith.select(_same(each, best), number.value, _constant(_NONE))
            for each, number in zip(keys, experts, strict=True)
        ]
        winner = _redux("min", functools.reduce(arith.minui, candidates))
        keys = [
            arith.select(_same(number.value, winner), _constant(0), each)
            for each, number in zip(keys, experts, strict=True)
        ]
        is_mine = _equal(lane, choice)
        key, expert = arith.select(is_mine, best, key), arith.select(is_mine, winner, expert)
        largest = _value(best) if largest is None else largest
    weight = _weight(plan, _value(key), values, largest, lane)
    if not plan.rule.has_shared:
        return expert, weight
    shared = _float(1.0)
    if plan.logits > plan.experts:
        shared = _sigmoid(_load(logits, begin + plan.experts, _f32()))
    return expert, arith.select(_equal(lane, plan.rule.k), shared, weight)


def _weight(plan: RouterPlan, value: Any, values: Any, largest: Any, lane: Word) -> Any:
    """The weight of a choice with such a logit; ``values``: a lane's logits."""
    rule, is_choice = plan.rule, _less(lane, plan.rule.k)
    score = _sigmoid(value) if rule.scores == "sigmoid" else _exponential(value, largest)
    if rule.scores == "softmax":
        terms = [_exponential(each, largest) for each in values]
        score = arith.divf(score, _over_lanes(functools.reduce(arith.addf, terms)))
    score = arith.select(is_choice, score, _float(0.0))
    if rule.scores == "chosen":
        score = arith.divf(score, _over_lanes(score))
    if rule.normalize:
        score = arith.divf(score, arith.addf(_over_lanes(score), _float(LEAST_SUM)))
    return arith.mulf(score, _float(rule.scale))


def _key(value: Any) -> Any:
    return ordered(Word(utils.bitcast(value, _i32()))).value


def _value(key: Any) -> Any:
    return utils.bitcast(of_ordered(Word(key)).value, _f32())


def _redux(operation: str, value: Any) -> Any:
    reduce = f"redux.sync.{operation}.u32 $0, $1, 0xffffffff;"
    how: Any = {"result_types": _i32(), "has_side_effects": True, "convergent": True}
    return utils.inline_ptx(reduce, value, **how)


def _over_lanes(value: Any) -> Any:
    for distance in (16, 8, 4, 2, 1):
        value = arith.addf(value, utils.shfl_bfly(value, distance))
    return value


def _exponential(value: Any, largest: Any) -> Any:
    power = arith.mulf(arith.subf(value, largest), _float(_LOG2_E))
    return utils.inline_ptx("ex2.approx.f32 $0, $1;", power, result_types=_f32())


def _sigmoid(value: Any) -> Any:
    power = arith.mulf(value, _float(-_LOG2_E))
    exponential = utils.inline_ptx("ex2.approx.f32 $0, $1;", power, result_types=_f32())
    return arith.divf(_float(1.0), arith.addf(_float(1.0), exponential))


def _load_four(ref: Any, place: Word) -> Any:
    at = utils.getelementptr(utils.memref_ptr(ref), [place.value], _f32())
    return llvm.load(ir.VectorType.get((SIDE_BY_SIDE,), _f32()), at, alignment=16)


def _load(ref: Any, place: Word, dtype: Any) -> Any:
    at = utils.getelementptr(utils.memref_ptr(ref), [place.value], dtype)
    return llvm.load(dtype, at, alignment=4)


def _store(ref: Any, place: Word, value: Any) -> None:
    dtype = ir.MemRefType(ref.type).element_type
    at = utils.getelementptr(utils.memref_ptr(ref), [place.value], dtype)
    llvm.store(value, at, alignment=4)


def _same(left: Any, right: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, left, right)


def _equal(word: Word, value: int) -> Any:
    return _same(word.value, _constant(value))


def _less(word: Word, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, word.value, _constant(bound))


def _word(value: int) -> Word:
    return Word(_constant(value))


def _constant(value: int) -> Any:
    return utils.c(value, _i32())


def _float(value: float) -> Any:
    return utils.c(value, _f32())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _f32() -> Any:
    return ir.F32Type.get()


# On MLIR's values, and in the tests on numbers.


def ordered(bits: Any) -> Any:
    """A float's bits as an integer without sign, of the same order. 0 is below all numbers."""
    return bits ^ ((bits >> 31) * _MAGNITUDE | _SIGN)


def of_ordered(key: Any) -> Any:
    """The inverse of ``ordered``."""
    return key ^ ((key >> 31 ^ 1) * _MAGNITUDE | _SIGN)
