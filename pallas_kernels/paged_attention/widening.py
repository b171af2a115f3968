"""From 8-bit floats to bfloat16 in shared memory, below the level of Pallas.

Through Pallas a thread would load 4 bytes at a time, and shuffles would bring them to the threads
that store them. So attention over 4k of context took a tenth longer on an H100. Here a thread
loads a chunk of 16 bytes and stores the two chunks that they become.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.float8 import decode
from pallas_kernels.shared_memory import LINE, SWIZZLED, TILE_ROWS, swizzled_bytes
from pallas_kernels.words import Word

CHUNK = 16  # bytes that a thread loads or stores at once; a swizzle moves them as one
WARPS = 4  # of a warpgroup
STEP = 4  # chunks that a thread loads before it stores any
TILE_COLUMNS = 64  # numbers of bfloat16 in a row of a tile


def widen(rows: Any, to: Any, *, interpret: bool) -> None:
    """Write the numbers of bytes in ``rows`` to ``to``, exactly; NaN stays NaN. One warpgroup.

    The caller must call ``plgpu.commit_smem`` afterwards.

    Args:
      rows: bytes of e4m3 numbers [n, D] in shared memory, laid out as ``swizzled_bytes(D)``; D is
        64, 128 or 256, n a multiple of 64.
      to: bfloat16 [n, D] in shared memory, laid out SWIZZLED.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        to[...] = decode(rows[...], jnp.float32).astype(to.dtype)
        return
    num_rows, width = rows.shape
    types = plgpu.RefType(swizzled_bytes(width)), plgpu.RefType(SWIZZLED)
    inlined: Any = plgpu.inline_mgpu(arg_types=types)(
        functools.partial(_emit, num_rows=num_rows, width=width)
    )
    inlined(rows, to)


def _emit(_: Any, rows: Any, to: Any, *, num_rows: int, width: int) -> None:
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    four = ir.VectorType.get((CHUNK // 4,), i32)
    thread = Word(mgpu.thread_idx())
    source, target = utils.memref_ptr(rows), utils.memref_ptr(to)
    places = list(chunk_places(thread, num_rows, width))
    for first in range(0, len(places), STEP):
        step, loaded = places[first : first + STEP], []
        for place, _ in step:
            at = utils.getelementptr(source, [place.value], i8)
            loaded.append(llvm.load(four, at, alignment=CHUNK))
        for (_, wide_places), chunk in zip(step, loaded, strict=True):
            words = _widened(chunk)
            for half, place in enumerate(wide_places):
                half_words = words[half * CHUNK // 4 : (half + 1) * CHUNK // 4]
                at = utils.getelementptr(target, [place.value], i8)
                llvm.store(vector.from_elements(four, half_words), at, alignment=CHUNK)


def _widened(chunk: Any) -> list[Any]:
    """A chunk's numbers in bfloat16, two in each word of 32 bits.

    A GPU of this kind has no conversion from e4m3 to bfloat16: float16 and float32 lie between.
    """
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    halves = ir.VectorType.get((2,), ir.F16Type.get())
    singles = ir.VectorType.get((2,), ir.F32Type.get())
    brains = ir.VectorType.get((2,), ir.BF16Type.get())
    pairs = utils.bitcast(chunk, ir.VectorType.get((CHUNK // 2,), i16))
    words = []
    for index in range(CHUNK // 2):
        pair = vector.extract(pairs, dynamic_position=[], static_position=[index])
        wide = llvm.inline_asm(i32, [pair], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        single = arith.extf(singles, utils.bitcast(wide, halves))
        words.append(utils.bitcast(arith.truncf(brains, single), i32))
    return words


# The arithmetic of a thread, on MLIR's values, and in the tests on numbers.


def chunk_places(thread: Any, num_rows: int, width: int) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """Where a thread's chunks are, and the two chunks that each becomes, in bytes from the start.

    In each turn a warp widens 8 rows of a tile. Of the 8 threads that access memory at once, 4 are
    at a row and 4 at the row whose index has two other bits, so that neither the chunks that they
    load nor those that they store share a bank.
    """
    thread = thread % (32 * WARPS)
    warp, lane = thread // 32, thread % 32
    quarter = lane % 4
    row = lane // 8 ^ lane // 4 % 2 * 5
    columns = min(width, LINE)  # of a tile of bytes
    tiles = columns // TILE_COLUMNS  # that it becomes
    for turn in range(num_rows * width // (TILE_ROWS * TILE_COLUMNS * WARPS)):
        unit = warp + turn * WARPS
        first_line, tile = unit // tiles * TILE_ROWS, unit % tiles
        swizzle = row * columns // LINE % (columns // CHUNK)
        place = (first_line + row) * columns + (tile * 4 + quarter ^ swizzle) * CHUNK
        line = (unit * TILE_ROWS + row) * LINE
        wide = tuple(line + (quarter * 2 + half ^ row) * CHUNK for half in range(2))
        yield place, (wide[0], wide[1])
