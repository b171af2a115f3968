"""A barrier for all thread blocks of a launch on Hopper GPUs, of which there may be no more than
the GPU runs at once.

It is a counter in device memory. Each block counts itself and waits until all are counted. The
counter runs over twice the blocks and then begins anew, so which half it is in tells two barriers
that follow each other from one another, and after an even number of barriers it is 0 again: nobody
has to clear it.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

THREADS = 128  # of a warpgroup


def meet(counter: Any, blocks: int, number: int) -> None:
    """Wait for all blocks. One warpgroup of each calls it; others may wait for that one.

    What its threads stored before is seen by all that wait; reads through the copy engine need
    ``fence_copies`` first.

    Args:
      counter: int32, one entry in device memory, 0 before the first barrier.
      number: of the barrier in the launch, from 0 on. There must be an even number of them.
    """

    def emit(_: Any, counter: Any) -> None:
        address = utils.memref_ptr(counter)
        gather()
        thread = arith.remui(mgpu.thread_idx(), _word(THREADS))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _word(0))):
            _arrive(address, blocks)
            _wait(address, blocks, number % 2)
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


def _arrive(counter: Any, blocks: int) -> None:
    """Count this block. Nobody waits for the answer."""
    utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
    count = "red.relaxed.gpu.global.inc.u32 [$0], $1;"
    utils.inline_ptx(count, counter, _word(2 * blocks - 1), has_side_effects=True)


def _wait(counter: Any, blocks: int, half: int) -> None:
    """Wait until the counter has left this half."""
    stays = arith.CmpIPredicate.uge if half else arith.CmpIPredicate.ult
    loop = scf.WhileOp([], [])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
        number = utils.inline_ptx(
            "ld.relaxed.gpu.global.b32 $0, [$1];",
            counter,
            result_types=_i32(),
            has_side_effects=True,
        )
        scf.condition(arith.cmpi(stays, number, _word(blocks)), [])
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
        scf.yield_([])
    utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)


def _word(value: int) -> Any:
    return utils.c(value, _i32())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
