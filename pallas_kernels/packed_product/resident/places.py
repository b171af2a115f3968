"""Where weights and rows lie in shared memory, and which thread holds what: index arithmetic.

The functions use the operators of unsigned 32-bit integers only. The kernel calls them with its
registers (see registers.py), tests with NumPy arrays of threads.

Tensor cores take a pair of neighboring places of a row from one register. A word of 8 consecutive
weights of 4 bits gives 4 pairs by a shift, a mask and a constant exponent; its nibbles c and c + 4
become a pair. So that no pair has to be moved to another thread, the inputs of each 32, a *span*,
are multiplied in another order than they are stored: place ``8 c + 2 t + e`` holds input
``8 t + 4 e + c``, for c and t in 0..3 and e in 0..1. Thread t of the four that share a row has the
8 weights from ``8 t`` on. Rows of x are stored to shared memory in the same order.

Weights and rows lie in tiles of 8 rows and one line of 128 or 64 bytes, as TMA and tensor cores
want them: the 16-byte pieces of a line are permuted by an exclusive or with the row (of a line of
64 bytes: with half the row).
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.packed_product.resident.tuning import BLOCK

Index = Any  # a register or a NumPy array of unsigned 32-bit integers

SPAN = 32  # inputs that are reordered among themselves
WORDS = 4  # of a span of weights: one for each thread that shares a row
BIAS = 136  # what is added to an integer of -8..7: 128, where bfloat16's step is 1, and 8
LINE = 128  # bytes of a row of weights in a tile
PIECE = 16  # bytes that stay together
ROWS = 8  # of a tile


def weight_offsets(thread: Index, start: int, unit: int, tiles_of_row: int) -> list[Index]:
    """Bytes from a block's begin to the words of a thread of a warpgroup.

    Two words for each span of the ``unit`` inputs from ``start`` on: of the thread's row, and of
    that 8 rows below.
    """
    lane, warp = thread % 32, thread // 32 % 4
    row = lane // WORDS
    tile_bytes = ROWS * LINE
    base = warp * (2 * tiles_of_row * tile_bytes) + row * LINE + lane % WORDS * 4
    offsets = []
    for first in range(start, start + unit, SPAN):
        tile, piece = divmod(first // SPAN, BLOCK // SPAN)
        at = base + (row ^ piece) * PIECE + tile * tile_bytes
        offsets += [at, at + tiles_of_row * tile_bytes]
    return offsets


def unpacked(word: Index) -> list[Index]:
    """The 4 pairs of bfloat16 of a word, each number BIAS too large: exact."""
    shifted = [word, *(word >> 4 * c for c in range(1, 4))]
    return [(one & 0x000F000F) ^ 0x43084308 for one in shifted]


def x_span(
    thread: Index, step: int, threads: int, spans: int, padded: int, at_most: Any
) -> tuple[Index, Index]:
    """The row, up to ``padded``, and the span of ``spans`` that a thread stores in a step.

    Threads past the last span take the last one: they store the same numbers again. ``at_most`` is
    the smaller of an index and a number.
    """
    index = thread // ROWS + step * (threads // ROWS)
    index = at_most(index, padded // ROWS * spans - 1)
    return index // spans * ROWS + thread % ROWS, index % spans


def x_steps(threads: int, spans: int, padded: int) -> int:
    """Steps that it takes all threads to store all rows."""
    return -(-(padded // ROWS * spans) // (threads // ROWS))


def x_offsets(row: Index, span: Index, unit: int, padded: int) -> list[Index]:
    """Bytes from the begin of x to the 4 pieces of a span of a row. ``unit``: places of a line."""
    spans_of_line = unit // SPAN
    line = 2 * unit
    base = span // spans_of_line * (padded * line) + row * line
    phase = row % 8 if unit == 64 else row % 8 // 2
    first = span % spans_of_line * 4
    return [base + ((first + c) ^ phase) * PIECE for c in range(4)]


def x_pieces(words: Sequence[Sequence[Index]]) -> list[list[Index]]:
    """The 4 pieces of a span of x, of 4 words each, from its inputs: word i of the t-th 8."""
    return [[_pair(eight[c // 2], eight[2 + c // 2], c % 2) for eight in words] for c in range(4)]


def _pair(low: Index, high: Index, half: int) -> Index:
    """The low (0) or high (1) 16 bits of two words."""
    if half:
        return (low >> 16) | (high & 0xFFFF0000)
    return (low & 0xFFFF) | (high << 16)
