"""A router's product with few rows on Hopper GPUs: each thread block has the logits of a few
experts.

Jobs are an expert and a part of the inputs; each warp has some of them, of all rows. Its lanes have
8 inputs each. Sums of parts are added up by another warpgroup, in order.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.expert_gate_up_down.plan import PART, WARPGROUPS, WARPS, RouterPlan
from pallas_kernels.products import einsum_f32
from pallas_kernels.words import Word

LANES = 32
ENTRIES = PART // LANES  # inputs of a lane
THREADS = LANES * WARPS
_READ = ("x", "router", "gate", "parts")


def sum_parts(plan: RouterPlan, refs: dict[str, Any], block: Array, warpgroup: Array) -> None:
    """Store a warpgroup's jobs of a thread block. Not interpreted: see ``store_logits``.

    ``refs``:
      x: bfloat16 [N, H]; router: bfloat16 [E, H]; both in device memory.
      gate: bfloat16 [..., H] in device memory; its first row is that of the last logit, if there
        are more of them than experts.
      parts: float32 in shared memory; a job has N entries.
    """
    types = [plgpu.RefType()] * len(_READ) + [plgpu.Layout.WG_SPLAT(())] * 2
    inlined: Any = plgpu.inline_mgpu(arg_types=tuple(types))
    given = *(refs[name] for name in _READ), block, warpgroup
    inlined(functools.partial(_emit_parts, plan=plan))(*given)


def store_logits(plan: RouterPlan, refs: dict[str, Any], block: Array, *, interpret: bool) -> None:
    """Store a thread block's logits, the sums of its jobs over the parts, in one warpgroup.

    ``refs``: as of ``sum_parts``, and logits: float32 [N, ...], of each row as many are written as
    there are.
    """
    logits = refs["logits"]
    if interpret:  # the interpreter does not support inlined MLIR: the first block writes all

        @pl.when(block == 0)
        def _():
            for name, first in (("router", 0), ("gate", plan.experts)):
                count = min(len(refs[name]), plan.logits - first)
                if count:
                    found = einsum_f32("nh,rh->nr", refs["x"][...], refs[name][:count])
                    logits[:, pl.ds(first, count)] = found

        return
    types = plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    inlined: Any = plgpu.inline_mgpu(arg_types=types)
    inlined(functools.partial(_emit_logits, plan=plan))(refs["parts"], logits, block)


def _emit_parts(
    _: Any,
    x: Any,
    router: Any,
    gate: Any,
    parts: Any,
    block: Any,
    warpgroup: Any,
    *,
    plan: RouterPlan,
) -> None:
    (rows, hidden), bf16 = ir.MemRefType(x.type).shape, ir.BF16Type.get()
    lane = Word(mgpu.thread_idx()) % LANES
    first = Word(warpgroup.registers.item()) * WARPS + Word(utils.warp_idx(sync=True)) % WARPS
    begin = Word(block.registers.item()) * plan.of_block
    for turn in range(plan.turns):
        job = first + turn * WARPGROUPS * WARPS
        expert, start = job // plan.parts + begin, job % plan.parts * PART + lane * ENTRIES
        there = arith.andi(_less(job, plan.jobs), _less(expert, plan.logits))
        read = Word(arith.minui(expert.value, _constant(plan.experts - 1)))
        of_expert, of_gate = _entry(router, read * hidden + start, bf16), _entry(gate, start, bf16)
        weights = _load(arith.select(_less(expert, plan.experts), of_expert, of_gate))
        inputs = [_load(_entry(x, start + row * hidden, bf16)) for row in range(rows)]
        sums = [_over_lanes(_dot(weights, entries)) for entries in inputs]
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane.value, _constant(0))
        with mgpu.when(arith.andi(there, is_first)):
            for row, total in enumerate(sums):
                llvm.store(total, _entry(parts, job * rows + row, _f32()), alignment=4)


def _emit_logits(_: Any, parts: Any, logits: Any, block: Any, *, plan: RouterPlan) -> None:
    rows, width = ir.MemRefType(logits.type).shape
    thread = Word(mgpu.thread_idx()) % THREADS
    place, row = thread // rows, thread % rows
    expert = place + Word(block.registers.item()) * plan.of_block
    there = arith.andi(_less(place, plan.of_block), _less(expert, plan.logits))
    with mgpu.when(there):
        places = [(place * plan.parts + part) * rows + row for part in range(plan.parts)]
        terms = [llvm.load(_f32(), _entry(parts, at, _f32()), alignment=4) for at in places]
        total = functools.reduce(arith.addf, terms)
        llvm.store(total, _entry(logits, row * width + expert, _f32()), alignment=4)


def _dot(weights: Any, entries: Any) -> Any:
    """The sum of a lane's products."""
    products = arith.mulf(weights, entries)
    terms = [vector.extract(products, [], [at]) for at in range(ENTRIES)]
    while len(terms) > 1:
        terms = [arith.addf(*terms[at : at + 2]) for at in range(0, len(terms), 2)]
    return terms[0]


def _over_lanes(value: Any) -> Any:
    for distance in (16, 8, 4, 2, 1):
        value = arith.addf(value, utils.shfl_bfly(value, distance))
    return value


def _load(address: Any) -> Any:
    """A lane's entries, in float32."""
    narrow = ir.VectorType.get((ENTRIES,), ir.BF16Type.get())
    loaded = llvm.load(narrow, address, alignment=2 * ENTRIES)
    return arith.extf(ir.VectorType.get((ENTRIES,), _f32()), loaded)


def _entry(ref: Any, place: Word, dtype: Any) -> Any:
    return utils.getelementptr(utils.memref_ptr(ref), [place.value], dtype)


def _less(word: Word, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, word.value, _constant(bound))


def _constant(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _f32() -> Any:
    return ir.F32Type.get()
