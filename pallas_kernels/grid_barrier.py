"""A barrier for all thread blocks of a launch on Hopper GPUs, of which there may be no more than
the GPU runs at once.

It is a counter in device memory. Each block counts itself and waits until all are counted. The
counter runs over as many times the blocks as a launch has barriers, and is 0 again then: nobody has
to clear it.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels.words import Word

THREADS = 128  # of a warpgroup


def meet(counter: Any, blocks: int, number: int, count: int, *, waits: bool = True) -> None:
    """Wait for all blocks. One warpgroup of each calls it; others may wait for that one.

    What its threads stored before is seen by all that wait; reads through the copy engine need
    ``fence_copies`` first.

    Args:
      counter: int32, one entry in device memory, 0 before the first barrier.
      number: of the barrier in the launch, from 0 on.
      count: of such barriers, at least 2: of a single one the counter would end where it begins.
      waits: False: the block counts itself only. It must not come to another barrier.
    """

    def emit(_: Any, counter: Any) -> None:
        address = utils.memref_ptr(counter)
        gather()
        thread = arith.remui(mgpu.thread_idx(), _word(THREADS))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _word(0))):
            _arrive(address, blocks * count)
            if waits:
                _wait(address, blocks * number, blocks)
        gather()

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    inlined(emit)(counter)


def fence_copies() -> None:
    """What was seen by this warpgroup's threads is seen by the copies that they start next."""

    def emit(_: Any) -> None:
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    inlined: Any = plgpu.inline_mgpu()
    inlined(emit)()


def gather() -> None:
    """Wait for all threads of the warpgroup, in inlined MLIR.

    Marked as convergent, unlike jax's barrier of a warpgroup: LLVM may copy that one into both
    branches of a condition beside it, and threads of a warp that wait in two places wait for ever.
    """
    place = utils.warpgroup_barrier_idx(sync=False)
    wait = f"bar.sync $0, {THREADS};"
    utils.inline_ptx(wait, place, has_side_effects=True, convergent=True)


def _arrive(counter: Any, end: int) -> None:
    """Count this block; the counter begins anew at ``end``. Nobody waits for the answer."""
    utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
    count = "red.relaxed.gpu.global.inc.u32 [$0], $1;"
    utils.inline_ptx(count, counter, _word(end - 1), has_side_effects=True)


def _wait(counter: Any, begin: int, blocks: int) -> None:
    """Wait until the counter has left the numbers from ``begin`` on, as many as blocks."""
    loop = scf.WhileOp([], [])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
        number = utils.inline_ptx(
            "ld.relaxed.gpu.global.b32 $0, [$1];",
            counter,
            result_types=_i32(),
            has_side_effects=True,
        )
        counted = counted_since(Word(number), begin).value
        scf.condition(arith.cmpi(arith.CmpIPredicate.ult, counted, _word(blocks)), [])
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
        scf.yield_([])
    utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)


def counted_since(number: Any, begin: int) -> Any:
    """Blocks that have come to the barrier which begins there, of the counter's number, unsigned:
    more than there are where the counter has begun anew."""
    return number - begin


def _word(value: int) -> Any:
    return utils.c(value, _i32())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
