"""From integers of 4 bits in shared memory to bfloat16 in registers, below the level of Pallas.

The tensor cores want of every 8 consecutive inputs two in each of the four threads that share a
row: the byte of the thread. So all four read the word and each takes its byte. A multiplication
moves the byte's upper half to the upper half of a register, and a constant exponent makes both
halves bfloat16: 128 + 8 + value, where the step of bfloat16 is 1.

For each two weights that is a PRMT, a multiplication, a LOP3, and the subtraction of the bias; see
tuning.py for what it comes to.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.packed_product.tuning import OUTPUTS
from pallas_kernels.shared_memory import swizzled

BIAS = 136  # what ``biased_weights`` adds: 128, where the step of bfloat16 is 1, and 8
CHUNK = 16  # bytes that a thread loads at once, and that a swizzle moves as one
HALVES = 0x000F000F  # where a byte's two weights are, once they are apart
WORD_INPUTS = 8  # weights in 32 bits
CHUNK_INPUTS = 2 * CHUNK
_SWIZZLED_BYTES = 128  # lines of shared memory, among which a swizzle permutes chunks


def biased_weights(ref: Any, start: int, inputs: int, *, interpret: bool) -> Array:
    """Weights plus BIAS, exactly, in bfloat16 [OUTPUTS, inputs] with Layout.WGMMA.

    Args:
      ref: int4 [OUTPUTS, block] in shared memory, laid out as ``swizzled(block, 4)``.
      start: first input: a multiple of 32, as is ``inputs``.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        return ref[...][:, start : start + inputs].astype(jnp.bfloat16) + jnp.bfloat16(BIAS)
    block = ref.shape[-1]
    result: Any = plgpu.ShapeDtypeStruct(
        (OUTPUTS, inputs), jnp.dtype("bfloat16"), layout=plgpu.Layout.WGMMA
    )
    emit = functools.partial(_emit, line=block // 2, start=start, inputs=inputs)
    inlined: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(block, 4)),), return_type=result
    )(emit)
    return inlined(ref)


def _emit(_: Any, tiles: Any, *, line: int, start: int, inputs: int) -> Any:
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    four, pair = ir.VectorType.get((4,), i32), ir.VectorType.get((2,), ir.BF16Type.get())
    thread, pointer = _Word(mgpu.thread_idx()), utils.memref_ptr(tiles)
    mask, layout = _mask_in_register(thread), mgpu.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((OUTPUTS, inputs)), dtype=object)
    flat = registers.reshape(-1)  # for each 8 inputs: of the thread's first row, of its second
    for chunk in range(inputs // CHUNK_INPUTS):
        for half in range(2):
            offset = chunk_offset(thread, start // CHUNK_INPUTS + chunk, half, line)
            at = utils.getelementptr(pointer, [offset.value], i8)
            words = llvm.load(four, at, alignment=CHUNK)
            for i in range(CHUNK_INPUTS // WORD_INPUTS):
                word = vector.extract(words, dynamic_position=[], static_position=[i])
                biased = biased_pair(_Word(word), thread, mask, _own_byte).value
                flat[2 * (CHUNK_INPUTS // WORD_INPUTS * chunk + i) + half] = utils.bitcast(
                    biased, pair
                )
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


# The arithmetic of a thread, on MLIR's values, and in the tests on numbers.


def chunk_offset(thread: Any, chunk: int, half: int, line: int) -> Any:
    """Where the 16 bytes of 32 inputs are, in bytes from the start of a warpgroup's weights.

    Args:
      chunk: the inputs are those from 32 * chunk on.
      half: 0 for the thread's first row, 1 for its second, which is 8 rows further.
      line: bytes of a row.
    """
    thread = thread % 128
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * half
    swizzle = row * line % (8 * line) // _SWIZZLED_BYTES
    return row * line + (swizzle ^ chunk) * CHUNK


def biased_pair(word: Any, thread: Any, mask: Any, own_byte: Any) -> Any:
    """Two of a word's 8 weights, plus BIAS, as bfloat16 in a 32-bit word: those of the thread.

    Args:
      mask: HALVES.
      own_byte: gives the byte of a word that a number in 0..3 names.
    """
    return (own_byte(word, thread % 4) * 0x1001 & mask) ^ 0x43084308


def _mask_in_register(thread: "_Word") -> "_Word":
    """HALVES. ptxas would move a constant to a register before every use.

    Bytes 0 and 2 are the same, and so it does not matter which one a thread's selector names.
    """
    halves = utils.c(HALVES, ir.IntegerType.get_signless(32))
    return _Word(utils.prmt(halves, halves, (thread % 2 * 2 | 0x3210).value))


def _own_byte(word: "_Word", selector: "_Word") -> "_Word":
    zero = utils.c(0, ir.IntegerType.get_signless(32))
    return _Word(utils.prmt(word.value, zero, (selector | 0x4440).value))  # 4: a byte of zero


class _Word:
    """An MLIR value of 32 bits, unsigned, with Python's operators."""

    def __init__(self, value: Any):
        self.value = value

    def _apply(self, operation: Any, other: "_Word | int") -> "_Word":
        i32 = ir.IntegerType.get_signless(32)
        right = other.value if isinstance(other, _Word) else utils.c(other, i32)
        return _Word(operation(self.value, right))

    def __add__(self, other: "_Word | int") -> "_Word":
        return self._apply(arith.addi, other)

    def __mul__(self, other: "_Word | int") -> "_Word":
        return self._apply(arith.muli, other)

    def __floordiv__(self, other: "_Word | int") -> "_Word":
        return self._apply(arith.divui, other)

    def __mod__(self, other: "_Word | int") -> "_Word":
        return self._apply(arith.remui, other)

    def __and__(self, other: "_Word | int") -> "_Word":
        return self._apply(arith.andi, other)

    def __or__(self, other: "_Word | int") -> "_Word":
        return self._apply(arith.ori, other)

    def __xor__(self, other: "_Word | int") -> "_Word":
        return self._apply(arith.xori, other)
