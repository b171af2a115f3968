"""Rows that several warpgroups of a CTA share: each has consecutive entries of one.

Where entries take many instructions, more threads are through with a row sooner.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from pallas_kernels import kernel_axes
from pallas_kernels.words import Word

THREADS = 128  # of a warpgroup
WARPS = 4  # of a warpgroup
FLOAT = 4  # bytes
THREAD_NAME = "warpgroup"
MOST_WARPGROUPS = 4
SHORTEST_PART = 1024  # entries of a warpgroup; 8 of a thread


@dataclasses.dataclass(frozen=True)
class RowParts:
    """How the entries of a row are shared.

    Attributes:
      width: entries of a row.
      warpgroups: that share it.
    """

    width: int
    warpgroups: int

    @property
    def part(self) -> int:
        """Entries of a warpgroup."""
        return self.width // self.warpgroups

    @property
    def layout(self) -> Any:
        """The layout of a part in registers, the same for all dtypes."""
        return plgpu.Layout.WG_STRIDED((self.part,), vec_size=math.gcd(self.part // THREADS, 4))

    def slice_of_part(self) -> Any:
        """The slice of a row that the calling warpgroup has."""
        return pl.ds(kernel_axes.index(THREAD_NAME) * self.part, self.part)

    def load(self, ref: Any) -> Array:
        """The calling warpgroup's part of a row."""
        return plgpu.load(ref.at[self.slice_of_part()], layout=self.layout)

    def scratch(self, interpret: Any = None) -> Any:
        """What a call of ``largest`` needs: a number of each warp in shared memory.

        The interpreter needs a barrier, too, in place of an inlined one.
        """
        values = plgpu.SMEM((WARPS * self.warpgroups,), jnp.float32)
        if interpret is None:
            return values
        return values, plgpu.Barrier(num_arrivals=self.warpgroups)

    def largest(self, part: Array, scratch: Any, interpret: Any = None) -> Array:
        """The largest entry of a row; no entry may be negative. All warpgroups must call it.

        Args:
          part: the calling warpgroup's, float32.
          scratch: what ``scratch`` describes; each call needs its own.
        """
        if interpret is not None:  # the interpreter does not support inlined MLIR
            values, written = scratch
            values[kernel_axes.index(THREAD_NAME) * WARPS] = jnp.max(part)
            plgpu.barrier_arrive(written)
            plgpu.barrier_wait(written)
            return jnp.max(values[...].reshape(-1, WARPS)[:, 0])
        types = self.layout, plgpu.RefType()
        scalar: Any = plgpu.ShapeDtypeStruct(
            (), jnp.dtype("float32"), layout=plgpu.Layout.WG_SPLAT(())
        )
        emit = functools.partial(_emit_largest, warps=WARPS * self.warpgroups)
        return plgpu.inline_mgpu(arg_types=types, return_type=scalar)(emit)(part, scratch)


def row_parts(width: int) -> RowParts:
    """For rows of a multiple of 256 entries, two for each thread of a warpgroup."""
    counts = range(1, MOST_WARPGROUPS + 1)
    fitting = [n for n in counts if not width % (2 * THREADS * n) and width >= SHORTEST_PART * n]
    return RowParts(width, max(fitting, default=1))


def _emit_largest(_: Any, part: Any, scratch: Any, *, warps: int) -> Any:
    """The largest entry of a thread, of a warp, and, through shared memory, of all warps."""
    i8, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
    value = largest_of_warp(functools.reduce(arith.maximumf, part.registers.flat))
    pointer, warp = utils.memref_ptr(scratch), Word(mgpu.thread_idx()) // 32
    place = utils.getelementptr(pointer, [(warp * FLOAT).value], i8)
    llvm.store(value, place)  # all lanes store the same
    gpu.barrier()
    numbers = llvm.load(ir.VectorType.get((warps,), f32), pointer, alignment=WARPS * FLOAT)
    return mgpu.FragmentedArray.splat(_largest(_entries(numbers)), ())


def largest_of_warp(values: Any) -> Any:
    """The largest entry of a warp's vectors, in all of its threads."""
    value = _largest(_entries(values))
    for distance in (16, 8, 4, 2, 1):
        value = arith.maximumf(value, utils.shfl_bfly(value, distance))
    return value


def _largest(values: Any) -> Any:
    return functools.reduce(arith.maximumf, values)


def _entries(values: Any) -> list[Any]:
    size = ir.VectorType(values.type).shape[0]
    return [
        vector.extract(values, dynamic_position=[], static_position=[index])
        for index in range(size)
    ]
