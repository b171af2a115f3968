"""Scales that are bytes, read ahead into the first-level cache of Hopper GPUs.

Each is read once, in bytes, and weights cannot be multiplied before: unlike the floats of blocks,
which many jobs share, they would come from memory in every job, while nothing else happens. The
warpgroup that copies weights is jobs ahead. So it lets the scales of the same job be copied, too,
by the way through the cache: each thread four bytes of a sector, to where nobody reads them.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.expert_gate_up_down.plan import THREADS
from pallas_kernels.words import Word

SECTOR = 32  # bytes that a cache reads at once
_WORD = 4  # bytes of a thread's copy


def fetch_scales(
    scale: Any, nowhere: Any, first: Array, *, rows: int, width: int, outputs: int
) -> None:
    """Begin to read rows of a job's scales; one warpgroup calls it. Not interpreted.

    Args:
      scale: uint8 [n] in device memory, rows of ``width``.
      nowhere: int32 [THREADS] in shared memory.
      first: the job's first scale; ``outputs`` of them follow each other in each row.
    """
    types = plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    inlined: Any = plgpu.inline_mgpu(arg_types=types)
    inlined(functools.partial(_emit, rows=rows, width=width, outputs=outputs))(
        scale, nowhere, first
    )


def _emit(
    _: Any, scale: Any, nowhere: Any, first: Any, *, rows: int, width: int, outputs: int
) -> None:
    thread, begin = Word(mgpu.thread_idx()) % THREADS, Word(first.registers.item())
    sectors = -(-outputs // SECTOR)
    to = utils.getelementptr(utils.memref_ptr(nowhere), [thread.value], _integer(32))
    for turn in range(-(-rows * sectors // THREADS)):
        index = thread + turn * THREADS
        place = begin + index // sectors * width + index % sectors * SECTOR
        inside = arith.cmpi(arith.CmpIPredicate.ult, index.value, _constant(rows * sectors))
        with mgpu.when(inside):
            source = utils.getelementptr(utils.memref_ptr(scale), [place.value], _integer(8))
            copy = f"cp.async.ca.shared.global [$0], [$1], {_WORD};"
            utils.inline_ptx(copy, to, source, has_side_effects=True)


def _constant(value: int) -> Any:
    return utils.c(value, _integer(32))


def _integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)
