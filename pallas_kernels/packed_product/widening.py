"""From integers of 4 bits in shared memory to floats in registers, below the level of Pallas.

Weights are stored so that each thread loads its own 8 of a row and of 32 inputs as one word (see
order.py).

- To bfloat16: a shift, a mask and a constant exponent make of a word two weights, one in each half
  of a register: 128 + 8 + value, where the step of bfloat16 is 1. For each 8 weights these are 3
  shifts, 4 LOP3, and 4 subtractions of the bias; see tuning.py for what it comes to.
- To 8-bit floats (e4m3): below 16 times their smallest step these count like integers, so the bits
  of a magnitude of up to 8 are the number itself, times FLOAT8_STEP. For each 8 weights these are 2
  shifts, 2 PRMT, 4 LOP3 and 2 additions.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.packed_product.order import SPAN, input_order
from pallas_kernels.packed_product.tuning import OUTPUTS
from pallas_kernels.shared_memory import swizzled
from pallas_kernels.words import Word

BIAS = 136  # what ``biased_weights`` adds: 128, where the step of bfloat16 is 1, and 8
CHUNK = SPAN // 2  # bytes of a span of a row, which a swizzle moves as one
WORD = 4  # bytes of a thread's weights in it
HALVES = 0x000F000F  # where a word's first pair is
PAIRS = 4  # in a word
FLOAT8_STEP = 2.0**-9  # the smallest e4m3 number
_SWIZZLED_BYTES = 128  # lines of shared memory, among which a swizzle permutes chunks


def biased_weights(ref: Any, start: int, inputs: int, *, interpret: bool) -> Array:
    """Weights plus BIAS, exactly, in bfloat16 [OUTPUTS, inputs] with Layout.WGMMA.

    Args:
      ref: int4 [OUTPUTS, block] in shared memory, laid out as ``swizzled(block, 4)``.
      start: first input: a multiple of 32, as is ``inputs``.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        integers = ref[...][:, start : start + inputs].astype(jnp.bfloat16)
        return input_order(integers) + jnp.bfloat16(BIAS)
    inlined = _inlined(_emit_pairs, "bfloat16", plgpu.Layout.WGMMA, ref.shape[-1], start, inputs)
    return inlined(ref)


def float8_weights(ref: Any, start: int, inputs: int, *, interpret: bool) -> Array:
    """Weights times FLOAT8_STEP, exactly, in e4m3 [OUTPUTS, inputs] with Layout.WGMMA_8BIT.

    As ``biased_weights``, of weights in the order for rows of 8 bits.
    """
    if interpret:
        integers = ref[...][:, start : start + inputs].astype(jnp.float32)
        return (input_order(integers, 8) * FLOAT8_STEP).astype(jnp.float8_e4m3fn)
    layout = plgpu.Layout.WGMMA_8BIT
    return _inlined(_emit_fours, "float8_e4m3fn", layout, ref.shape[-1], start, inputs)(ref)


def _inlined(emit: Any, dtype: str, layout: Any, block: int, start: int, inputs: int) -> Any:
    """A function of a ``ref`` as above, which ``emit`` writes."""
    result: Any = plgpu.ShapeDtypeStruct((OUTPUTS, inputs), jnp.dtype(dtype), layout=layout)
    emit_here = functools.partial(emit, line=block // 2, start=start, inputs=inputs)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(block, 4)),), return_type=result)(
        emit_here
    )


def _emit_pairs(_: Any, tiles: Any, *, line: int, start: int, inputs: int) -> Any:
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    mask, layout = mask_in_register(Word(mgpu.thread_idx())), mgpu.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((OUTPUTS, inputs)), dtype=object)
    by_span = registers.reshape(-1, PAIRS, 2)  # the last: of the thread's first row, of its second
    for span, half, word in _words(tiles, line, start, inputs):
        for j, biased in enumerate(biased_pairs(word, mask)):
            by_span[span, j, half] = utils.bitcast(biased.value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _emit_fours(_: Any, tiles: Any, *, line: int, start: int, inputs: int) -> Any:
    four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    layout = mgpu.fragmented_array.WGMMA_LAYOUT_8BIT
    registers = np.empty(layout.registers_shape((OUTPUTS, inputs)), dtype=object)
    by_span = registers.reshape(-1, 2, 2)
    for span, half, word in _words(tiles, line, start, inputs):
        for h, floats in enumerate(float8_fours(word)):
            by_span[span, h, half] = utils.bitcast(floats.value, four)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _words(tiles: Any, line: int, start: int, inputs: int) -> Iterator[tuple[int, int, "Word"]]:
    """A thread's words: of each span of inputs, of its first row and of its second."""
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    thread, pointer = Word(mgpu.thread_idx()), utils.memref_ptr(tiles)
    for span in range(inputs // SPAN):
        for half in range(2):
            offset = word_offset(thread, start // SPAN + span, half, line)
            at = utils.getelementptr(pointer, [offset.value], i8)
            yield span, half, Word(llvm.load(i32, at, alignment=WORD))


# The arithmetic of a thread, on MLIR's values, and in the tests on numbers.


def word_offset(thread: Any, span: int, half: int, line: int) -> Any:
    """Where a thread's 8 weights of a span are, in bytes from the start of a warpgroup's weights.

    Args:
      span: the inputs are some of those from SPAN * span on.
      half: 0 for the thread's first row, 1 for its second, which is 8 rows further.
      line: bytes of a row.
    """
    thread = thread % 128
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * half
    swizzle = row * line % (8 * line) // _SWIZZLED_BYTES
    return row * line + (swizzle ^ span) * CHUNK + thread % 4 * WORD


def biased_pairs(word: Any, mask: Any) -> list[Any]:
    """The pairs of a word, plus BIAS, each as two bfloat16 in 32 bits; ``mask``: HALVES."""
    shifted = [word, *(word >> 4 * j for j in range(1, PAIRS))]
    return [(word & mask) ^ 0x43084308 for word in shifted]


def float8_fours(word: Any) -> list[Any]:
    """The fours of a word, times FLOAT8_STEP, each as four e4m3 numbers in 32 bits."""
    return [_float8_of(word, word << 4), _float8_of(word >> 4, word)]


def _float8_of(low: Any, high: Any) -> Any:
    """The floats of the integers in the low half of each byte; ``high`` has them in the high half.

    The magnitude of a negative one is its complement plus 1.
    """
    negative = signs(high)
    return ((low ^ negative) & 0x07070707) + (negative & 0x81818181)


def signs(word: Any) -> Any:
    """255 in each byte whose highest bit is 1, else 0."""
    if isinstance(word, Word):
        return Word(utils.prmt(word.value, word.value, utils.c(0xBA98, word.value.type)))
    return (word >> 7 & 0x01010101) * 255


def mask_in_register(thread: "Word") -> "Word":
    """HALVES. ptxas would move a constant to a register before every use.

    Bytes 0 and 2 are the same, and so it does not matter which one a thread's selector names.
    """
    halves = utils.c(HALVES, ir.IntegerType.get_signless(32))
    return Word(utils.prmt(halves, halves, (thread % 2 * 2 | 0x3210).value))
