"""Reads of an array ahead into the second-level cache of Hopper GPUs, for reads that follow."""

import math
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.words import Word

THREADS = 128  # of a warpgroup
CHUNK = 1024  # bytes of a thread at a time


def fetch_share(array: Any, block: Array, blocks: int) -> None:
    """Begin to read a thread block's share of an array in device memory; one warpgroup of each
    block calls it. Nobody waits for the bytes, but the launch ends when they are there."""

    def emit(_: Any, array: Any, block: Any) -> None:
        kind, address = ir.MemRefType(array.type), utils.memref_ptr(array)
        num_bytes = math.prod(kind.shape) * utils.bitwidth(kind.element_type) // 8
        thread = Word(mgpu.thread_idx()) % THREADS
        first = (Word(block.registers.item()) * THREADS + thread) * CHUNK
        for turn in range(-(-num_bytes // (blocks * THREADS * CHUNK))):
            begin = first + turn * blocks * THREADS * CHUNK
            inside = arith.cmpi(arith.CmpIPredicate.ult, begin.value, utils.c(num_bytes, _i32()))
            with mgpu.when(inside):
                place = utils.getelementptr(address, [begin.value], ir.IntegerType.get_signless(8))
                fetch = "cp.async.bulk.prefetch.L2.global [$0], $1;"
                utils.inline_ptx(fetch, place, utils.c(CHUNK, _i32()), has_side_effects=True)

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    inlined(emit)(array, block)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
