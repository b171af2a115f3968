"""The scales of groups of 128 entries of a row that a warpgroup has, below the level of Pallas.

Each thread has 4 neighboring entries of every 512, so a warp has a group, in one register of
vectors: the largest entry of a group needs no memory.
"""

import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.float8 import LARGEST
from pallas_kernels.round_tokens.reference import GROUP, SMALLEST, scale_of
from pallas_kernels.round_tokens.row_parts import FLOAT, THREADS, WARPS, RowParts, largest_of_warp
from pallas_kernels.words import Word


def group_scales(parts: RowParts, part: Array, scale_ref: Any, row: Array, interpret: Any) -> Array:
    """Scales of the groups of a row's entries, an equal one for each entry of a group: [K].

    Args:
      part: all entries, float32 [K].
      scale_ref: [K / GROUP, P] in global memory, whose column ``row`` is written.
    """
    if interpret is not None:  # the interpreter does not support inlined MLIR
        scale = scale_of(jnp.max(jnp.abs(part).reshape(-1, GROUP), axis=1))
        scale_ref[:, row] = scale
        return jnp.repeat(scale, GROUP)
    types = parts.layout, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    result: Any = plgpu.ShapeDtypeStruct((parts.width,), jnp.dtype("float32"), layout=parts.layout)
    emit = functools.partial(_emit, columns=scale_ref.shape[1])
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(emit)(part, scale_ref, row)


def _emit(_: Any, part: Any, scale_ref: Any, row: Any, *, columns: int) -> Any:
    i8, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
    pointer, column = utils.memref_ptr(scale_ref), Word(row.registers.item())
    warp = Word(mgpu.thread_idx()) % THREADS // 32
    registers = np.empty_like(part.registers)
    for index, entries in enumerate(part.registers.flat):
        scale = _scale_of(largest_of_warp(math.absf(entries)), f32)
        place = ((warp + WARPS * index) * columns + column) * FLOAT
        llvm.store(scale, utils.getelementptr(pointer, [place.value], i8))  # all lanes the same
        registers.flat[index] = vector.broadcast(entries.type, scale)
    return mgpu.FragmentedArray(_registers=registers, _layout=part.layout, _is_signed=None)


def _scale_of(largest: Any, f32: Any) -> Any:
    """``reference.scale_of``"""
    is_larger = arith.cmpf(arith.CmpFPredicate.OGT, largest, utils.c(SMALLEST, f32))
    return arith.mulf(
        arith.select(is_larger, largest, utils.c(1.0, f32)), utils.c(1 / LARGEST, f32)
    )
