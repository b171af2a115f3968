"""From numbers of 4 or 8 bits in shared memory to bfloat16 in registers, below the level of Pallas.

A thread reads its numbers of 16 bytes of a row as one word (see packed_order.py), and moves their
bits to where bfloat16 has them:

- e4m3 and e2m1 have fewer bits of exponent: moved there they are bfloat16 of a much smaller number,
  by a power of two. Also numbers below the least normal one are right. A product brings them back,
  exactly. Where groups have scales that are bytes, it is the product with the scale of the group,
  which is exact, too: a scale is a power of two (e8m0), or it has four bits (e5m3), which with the
  two of e2m1 fit the eight of bfloat16. A part of the power is left to the sums (SUMS_OF_SCALED),
  for it would not fit a factor in bfloat16.
- int4, which are stored plus 8: with the exponent of 128 they are 128 and as much more, by BIAS too
  large. The zeros of groups have this bias in memory. Differences are exact.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.expert_product.tuning import OUTPUTS
from pallas_kernels.four_bits import ScaleCode, widened_scales
from pallas_kernels.packed_experts import BIAS, Code, numbers_of
from pallas_kernels.packed_order import WORD
from pallas_kernels.shared_memory import TILE_ROWS, swizzled
from pallas_kernels.words import Word

# Numbers as bfloat16 are smaller by 2 to this.
SHIFTS: Mapping[str, int] = MappingProxyType({"e2m1": 126, "e4m3": 120})
LEFT_SHIFT = 63  # of it, what is left to the sums
SUMS_OF_SCALED = 2.0**LEFT_SHIFT  # times sums of ``scaled_weights``
# Of a byte of a scale: how far it is moved to the bits of bfloat16, and what is added to its
# exponent: the difference of the biases.
SCALE_BITS: Mapping[ScaleCode, tuple[int, int]] = MappingProxyType(
    {"e8m0": (7, 0), "e5m3": (4, 127 - 15)}
)
E4M3_POWER = 0x7B80  # 2^120 in bfloat16: e4m3 as bfloat16 is smaller by that
HALF = 0x00010001  # in both halves of a word
PAIRS_APART = 8  # inputs between a thread's pairs
CHUNK = 16  # bytes of a row, which a swizzle moves as one: a word for each of four threads
_SWIZZLED_BYTES = 128  # lines of shared memory, among which a swizzle permutes chunks


@dataclasses.dataclass(frozen=True)
class Part:
    """Inputs of a block: from ``start`` on, so many. Multiples of 32, of e4m3 of 16.

    ``line``: bytes of a tile's row, in whose layout the block is: swizzled(line, 8).
    """

    start: int
    inputs: int
    line: int


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Numbers of ``code`` of which ``group`` inputs share a scale, a byte of ``scale_code``, or of
    integers a zero.

    ``group``: a multiple of 16.
    """

    code: Code
    group: int
    scale_code: ScaleCode


def float8_weights(ref: Any, part: Part, *, interpret: bool) -> Array:
    """e4m3 numbers, exactly, in bfloat16 [OUTPUTS, inputs] with Layout.WGMMA.

    ``ref``: uint8 [OUTPUTS, bytes] in shared memory.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        return _of_part(numbers_of(ref[...], "e4m3"), part).astype(jnp.bfloat16)
    emit = functools.partial(_emit_float8, part=part, size=ref.shape[1])
    return _inlined(emit, part, swizzled(part.line, 8))(ref)


def integer_weights(ref: Any, part: Part, *, interpret: bool) -> Array:
    """int4 numbers, exactly, as ``float8_weights``."""
    if interpret:
        return _of_part(numbers_of(ref[...], "int4"), part).astype(jnp.bfloat16)
    emit = functools.partial(_emit_integers, part=part, size=ref.shape[1])
    return _inlined(emit, part, swizzled(part.line, 8))(ref) - jnp.bfloat16(BIAS)


def scaled_weights(
    ref: Any, scales: Any, part: Part, grouped: Grouped, *, interpret: bool
) -> Array:
    """Numbers times their scales over SUMS_OF_SCALED, exactly, as ``float8_weights``.

    ``scales``: uint8 [groups of the block, OUTPUTS] in shared memory; those of 2^-61 to 2^63 are
    exact.
    """
    if interpret:
        numbers = _of_part(numbers_of(ref[...], grouped.code), part)
        factors = widened_scales(scales[...], grouped.scale_code).T / SUMS_OF_SCALED
        factors = _of_part(jnp.repeat(factors, grouped.group, 1), part)
        return (numbers * factors).astype(jnp.bfloat16)
    emit = functools.partial(_emit_grouped, part=part, size=ref.shape[1], grouped=grouped)
    return _inlined(emit, part, swizzled(part.line, 8), ())(ref, scales)


def integers_less_zeros(
    ref: Any, zeros: Any, part: Part, grouped: Grouped, *, interpret: bool
) -> Array:
    """int4 numbers less the zeros of their groups, exactly, as ``float8_weights``.

    ``zeros``: bfloat16 [groups of the block, OUTPUTS] in shared memory, plus BIAS.
    """
    if interpret:
        by_group = zeros[...].T.astype(jnp.float32) - BIAS
        less = _of_part(jnp.repeat(by_group, grouped.group, 1), part)
        return (_of_part(numbers_of(ref[...], "int4"), part) - less).astype(jnp.bfloat16)
    emit = functools.partial(_emit_grouped, part=part, size=ref.shape[1], grouped=grouped)
    return _inlined(emit, part, swizzled(part.line, 8), ())(ref, zeros)


def _of_part(x: Array, part: Part) -> Array:
    return x[:, part.start : part.start + part.inputs]


def _inlined(emit: Any, part: Part, *transforms: Any) -> Any:
    """A function of refs with such transforms, which ``emit`` writes."""
    layout, shape = plgpu.Layout.WGMMA, (OUTPUTS, part.inputs)
    result: Any = plgpu.ShapeDtypeStruct(shape, jnp.dtype("bfloat16"), layout=layout)
    types = tuple(plgpu.RefType(each) for each in transforms)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(emit)


def _emit_float8(_: Any, tiles: Any, *, part: Part, size: int) -> Any:
    registers, power = _registers(part, 2), _pair(E4M3_POWER * HALF)
    for i, half, word in _words(tiles, part, size, CHUNK):
        for j, pair in enumerate(float8_pairs(word)):
            registers[i, j, half] = arith.mulf(_as_pair(pair), power)
    return _array(registers, part)


def _emit_integers(_: Any, tiles: Any, *, part: Part, size: int) -> Any:
    registers = _registers(part, 4)
    for i, half, word in _words(tiles, part, size, 2 * CHUNK):
        for j, pair in enumerate(biased_pairs(word)):
            registers[i, j, half] = _as_pair(pair)
    return _array(registers, part)


def _emit_grouped(
    _: Any, tiles: Any, by_group: Any, *, part: Part, size: int, grouped: Grouped
) -> Any:
    pairs, pairs_of, operation = {
        "e4m3": (2, float8_pairs, arith.mulf),
        "e2m1": (4, e2m1_pairs, arith.mulf),
        "int4": (4, biased_pairs, arith.subf),
    }[grouped.code]
    registers, by_place, inputs = _registers(part, pairs), {}, PAIRS_APART * pairs
    for i, half, word in _words(tiles, part, size, inputs):
        first = part.start + i * inputs
        places = [((first + PAIRS_APART * j) // grouped.group, half) for j in range(pairs)]
        for place in places:
            if place not in by_place:
                by_place[place] = _of_group(by_group, *place, grouped)
        for j, pair in enumerate(pairs_of(word)):
            registers[i, j, half] = operation(_as_pair(pair), by_place[places[j]])
    return _array(registers, part)


def _registers(part: Part, pairs: int) -> Any:
    """The registers of a result, by word, by its pairs, by the thread's first and second row."""
    shape = mgpu.WGMMA_LAYOUT.registers_shape((OUTPUTS, part.inputs))
    return np.empty(shape, dtype=object).reshape(-1, pairs, 2)


def _array(registers: Any, part: Part) -> Any:
    layout = mgpu.WGMMA_LAYOUT
    whole = registers.reshape(layout.registers_shape((OUTPUTS, part.inputs)))
    return mgpu.FragmentedArray(_registers=whole, _layout=layout, _is_signed=None)


def _words(tiles: Any, part: Part, size: int, inputs: int) -> Iterator[tuple[int, int, Word]]:
    """A thread's words, of so many ``inputs``: of its first row and of its second."""
    for i in range(part.inputs // inputs):
        for half in range(2):
            chunk = part.start // inputs + i
            offset = word_offset(Word(mgpu.thread_idx()), chunk, half, part.line, size)
            yield i, half, Word(_load(tiles, offset, _i32(), WORD))


def _of_group(by_group: Any, group: int, half: int, grouped: Grouped) -> Any:
    """What a thread's row has in a group, twice, in bfloat16: the scale times what pairs lack, or
    the zero plus BIAS."""
    place = row_of(Word(mgpu.thread_idx()), half) + group * OUTPUTS
    if grouped.code == "int4":
        zero = _load(by_group, place * 2, ir.IntegerType.get_signless(16), 2)
        return _as_pair(Word(arith.extui(_i32(), zero)) * HALF)
    wide = Word(arith.extui(_i32(), _load(by_group, place, _i8(), 1)))
    return _as_pair(scale_pair(wide, grouped.scale_code, SHIFTS[grouped.code]))


def _load(ref: Any, offset: Word, kind: Any, alignment: int) -> Any:
    at = utils.getelementptr(utils.memref_ptr(ref), [offset.value], _i8())
    return llvm.load(kind, at, alignment=alignment)


def _i8() -> Any:
    return ir.IntegerType.get_signless(8)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _pair(bits: int) -> Any:
    return _as_pair(Word(utils.c(bits, _i32())))


def _as_pair(word: Word) -> Any:
    return utils.bitcast(word.value, ir.VectorType.get((2,), ir.BF16Type.get()))


# The arithmetic of a thread, on MLIR's values, and in the tests on numbers.


def row_of(thread: Any, half: int) -> Any:
    """A thread's row of a warpgroup's outputs."""
    thread = thread % 128
    return thread // 32 * 16 + thread % 32 // 4 + 8 * half


def word_offset(thread: Any, chunk: int, half: int, line: int, size: int) -> Any:
    """Where a thread's word of 16 bytes of its row is, in bytes from the start of a block.

    Args:
      half: 0 for the thread's first row, 1 for its second.
      line: bytes of a row of a tile.
      size: of a row of the block, which has ``size / line`` tiles beside each other.
    """
    row = row_of(thread, half)
    tile, chunk = divmod(chunk, line // CHUNK)
    swizzle = row % TILE_ROWS * line // _SWIZZLED_BYTES
    of_tile = row // TILE_ROWS * (TILE_ROWS * size) + tile * TILE_ROWS * line
    return of_tile + row % TILE_ROWS * line + (swizzle ^ chunk) * CHUNK + thread % 4 * WORD


def float8_pairs(word: Any) -> list[Any]:
    """The two pairs of a word of e4m3 numbers, each as two bfloat16 in 32 bits, over 2^120."""
    return [
        (word << 4) & 0x87F087F0,
        word & 0x87808780 | (word >> 8) & 0x00700070,
    ]


def biased_pairs(word: Any) -> list[Any]:
    """The four pairs of a word of int4 numbers plus BIAS, each as two bfloat16 in 32 bits."""
    shifted = [word, word >> 4, word >> 8, word >> 12]
    return [pair & 0x000F000F ^ 0x43004300 for pair in shifted]


def e2m1_pairs(word: Any) -> list[Any]:
    """The four pairs of a word of e2m1 numbers, each as two bfloat16 in 32 bits, over 2^126."""
    return [
        (word << 6) & 0x81C081C0,
        (word << 2) & 0x81C081C0,
        (word >> 4 | word << 28) & 0x81C081C0,
        word & 0x81808180 | (word >> 8) & 0x00400040,
    ]


def scale_pair(byte: Any, code: ScaleCode, shift: int) -> Any:
    """Two bfloat16 in 32 bits of a scale, times 2^(shift - LEFT_SHIFT)."""
    place, more = SCALE_BITS[code]
    return byte * (HALF << place) + (more + shift - LEFT_SHIFT) * (HALF << 7)
