"""Products of a block of weights of 4 bits and x, of one warpgroup of Hopper GPUs.

Each warp has one group of the block's inputs, so its sums are scaled once. The products are those
of single warps (mma.sync, 16 outputs, 8 rows, 16 inputs): loads, widening and products of one warp
overlap, which they do not around the products of warpgroups. Threads have the same weights for both
kinds, so weights are stored as for packed_product.

They are widened with fewer shifts. Below twice its least normal number bfloat16 counts like
integers, in steps of 2^-133, so the lowest 8 bits of each half of a word are a number already: a
mask leaves 4 of them, and one multiplication and addition makes these STEP times the weight, less
its zero. For 8 weights that is 1 shift, 4 LOP3 and 4 fused multiplications; all of it is exact.

Sums of a warpgroup are an array [WARPS * TILE, TILES * ROWS]: entry [TILE * w + o, ROWS * t + r] is
the sum over the inputs of warp w, of output o of tile t and row r.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.o_gate_up_down.plan import BLOCK, GROUP, ROWS, TILE, TILES, WARPS
from pallas_kernels.packed_product.order import SPAN, input_order
from pallas_kernels.packed_product.widening import HALVES
from pallas_kernels.shared_memory import LINE, TILE_ROWS, swizzled
from pallas_kernels.warp_products import load_matrices, multiply_add, shared_address
from pallas_kernels.words import Word

SUMS = (WARPS * TILE, TILES * ROWS)
WEIGHT_TRANSFORMS = swizzled(2 * LINE, 4)
X_TRANSFORMS = swizzled(LINE // 2, 16)
_CHUNK = 16  # bytes that a swizzle moves as one: 32 weights, or 8 entries of x
_TILE_BYTES = TILE_ROWS * LINE
STEP = 2.0**-6  # of widened weights: the least bfloat16 times the largest power of 2 of bfloat16


def no_sums(*, interpret: bool) -> Array:
    zeros = jnp.zeros(SUMS, jnp.float32)
    return zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def add_block(
    values: Any, factors: list[Any], x: Any, start: Array, total: Array, *, interpret: bool
) -> Array:
    """total + the sums of a block.

    Args:
      values: int4 [TILES, TILE, BLOCK], laid out as WEIGHT_TRANSFORMS.
      factors: scales, and zeros if there are any: [WARPS, TILES, TILE], of the warps' groups.
      x: bfloat16 [ROWS, ...], laid out as X_TRANSFORMS; the block's inputs begin at ``start``.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        weights = input_order(values[...].astype(jnp.float32))
        weights = weights.reshape(TILES, TILE, WARPS, GROUP)
        scale, *zero = factors
        if zero:
            weights -= zero[0][...].astype(jnp.float32).transpose(1, 2, 0)[..., None]
        rows = lax.dynamic_slice(x[...], (0, start), (ROWS, BLOCK)).astype(jnp.float32)
        sums = jnp.einsum("towk,rwk->wotr", weights, rows.reshape(ROWS, WARPS, GROUP))
        scaled = sums * scale[...].astype(jnp.float32).transpose(0, 2, 1)[..., None]
        return total + scaled.reshape(SUMS)
    refs = [plgpu.RefType(WEIGHT_TRANSFORMS), plgpu.RefType(X_TRANSFORMS)]
    refs += [plgpu.RefType()] * len(factors)
    result: Any = plgpu.ShapeDtypeStruct(SUMS, jnp.dtype("float32"), layout=plgpu.Layout.WGMMA)
    types = plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WGMMA, *refs
    inlined: Any = plgpu.inline_mgpu(arg_types=types, return_type=result)
    return inlined(_emit)(start, total, values, x, *factors)


def _emit(_: Any, start: Any, total: Any, values: Any, x: Any, *factors: Any) -> Any:
    thread = Word(mgpu.thread_idx()) % 128
    lane, warp = thread % 32, thread // 32
    values, x = shared_address(values), shared_address(x)
    masks = [_in_register(thread, HALVES << 4 * at) for at in range(2)]
    no_zero = _in_register(thread, _pair(-8 * STEP)).value
    first = Word(start.registers.item()) // 8
    columns = [
        load_matrices(x + row_chunk(lane, first, warp, span)) for span in range(GROUP // SPAN)
    ]
    sums = tiles_of(total)
    for tile in range(TILES):
        factor, *zero = (by_output(ref, lane, warp, tile) for ref in factors)
        addends = [_addend(z) for z in zero[0]] if zero else 2 * [no_zero]
        product = [utils.c(0.0, f32())] * 4
        for pair in range(GROUP // SPAN // 2):
            words = load_matrices(values + weight_chunk(lane, warp, tile, pair))
            for span in range(2):
                wide = [
                    [_scaled(*pair, addend) for pair in scaled_pairs(Word(word), masks)]
                    for word, addend in zip(words[2 * span :], addends, strict=False)
                ]
                product = _multiply(product, wide, columns[2 * pair + span])
        unscaled = [arith.mulf(of_output, utils.c(1 / STEP, f32())) for of_output in factor]
        sums[tile] = [
            llvm.intr_fma(value, unscaled[at // 2], sums[tile][at])
            for at, value in enumerate(product)
        ]
    return array_of(sums, total)


def _multiply(product: Any, wide: Any, columns: Any) -> Any:
    """product + the weights of a span times x; ``wide``: see first_operand."""
    for half in range(2):
        product = multiply_add(product, first_operand(wide, half), columns[2 * half : 2 * half + 2])
    return product


def first_operand(wide: Any, half: int) -> list[Any]:
    """The pairs of 16 inputs of a span; ``wide``: those of the first output, and of the second."""
    return [wide[output][2 * half + column] for column in range(2) for output in range(2)]


# Where the 32 lanes of a warp find what ldmatrix loads: each names a chunk of a row, in bytes from
# the start of the array. On MLIR's values, and in the tests on numbers.


def weight_chunk(lane: Any, warp: Any, tile: int, pair: int) -> Any:
    """Two spans, one after the other, of the first 8 outputs of a tile and of the other 8."""
    chunk = warp % 2 * (GROUP // SPAN) + lane // 16 + 2 * pair  # of a line
    lines = (lane // 8 % 2 + 2 * tile) * 2 + warp // 2
    return line_chunk(lines, lane % 8, chunk)


def row_chunk(lane: Any, first: Any, warp: Any, span: int) -> Any:
    """A span, in four chunks of 8 inputs, of all rows; ``first``: the block's first chunk."""
    return entry_chunk(lane % 8, first + warp * (GROUP // 8) + (lane // 8 + 4 * span))


def entry_chunk(row: Any, chunk: Any) -> Any:
    """8 entries of a row of x, or 16 if they have 8 bits."""
    return line_chunk(chunk // 8, row, chunk % 8)


def line_chunk(line: Any, row: Any, chunk: Any) -> Any:
    """A chunk of a line, in row ``row`` of 8; ``line``: lines of 8 rows before these."""
    return line * _TILE_BYTES + (row * LINE + (chunk ^ row) * _CHUNK)


def scaled_pairs(word: Any, masks: list[Any]) -> list[tuple[Any, float]]:
    """The pairs of a word, plus 8, in two bfloat16 each, and what makes them STEP times as large.

    ``masks``: HALVES, and the same 4 bits further.
    """
    return [
        ((shifted & mask) ^ (0x00080008 << 4 * at), 2.0 ** (127 - 4 * at))
        for shifted in (word, word >> 8)
        for at, mask in enumerate(masks)
    ]


def _in_register(thread: Word, pair: int) -> Word:
    """A constant of two equal halves, made by an instruction that LLVM takes out of loops. ptxas
    would move it to a register before every use.

    Bytes 0 and 2 are the same, and so it does not matter which one a thread's selector names.
    """
    halves, selector = _constant(pair), thread % 2 * 2 | 0x3210
    given = [halves, halves, selector.value]
    return Word(llvm.call_intrinsic(_i32(), "llvm.nvvm.prmt", given, [], []))


def _pair(value: float) -> int:
    """A bfloat16 twice, as the bits of a word."""
    return int(np.asarray(value, jnp.bfloat16).view(np.uint16)) * 0x00010001


def by_output(ref: Any, lane: Any, warp: Any, tile: int) -> list[Any]:
    """Float32 factors of a thread's two outputs of a tile."""
    first = warp * (TILES * TILE) + lane // 4 + TILE * tile
    return [load_f32(ref, first + 8 * half) for half in range(2)]


def load_f32(ref: Any, place: Word) -> Any:
    """An entry of bfloat16, float16 or float32, counted from where the array begins."""
    dtype = ir.MemRefType(ref.type).element_type
    at, bits = (
        utils.getelementptr(utils.memref_ptr(ref), [place.value], dtype),
        utils.bitwidth(dtype),
    )
    value = llvm.load(dtype, at, alignment=bits // 8)
    return value if bits == 32 else arith.extf(f32(), value)


def _addend(zero: Any) -> Any:
    """-STEP * (8 + zero), exactly: two bfloat16 in 32 bits."""
    scaled = arith.mulf(arith.addf(zero, utils.c(8.0, f32())), utils.c(-STEP, f32()))
    convert = "cvt.rn.bf16x2.f32 $0, $1, $1;"
    return utils.inline_ptx(convert, scaled, result_types=_i32())


def _scaled(pair: Word, factor: float, addend: Any) -> Any:
    """pair * factor + addend, of two bfloat16; the smallest numbers are not flushed to 0."""
    multiply = "fma.rn.bf16x2 $0, $1, $2, $3;"
    factors = _constant(_pair(factor))
    return utils.inline_ptx(multiply, pair.value, factors, addend, result_types=_i32())


def tiles_of(array: Any) -> list[list[Any]]:
    """A thread's sums of each tile: of two rows of the first output, and of the second."""
    pairs = array.registers.reshape(TILES, 2)
    return [
        [vector.extract(pair, [], [at]) for pair in pairs[tile] for at in range(2)]
        for tile in range(TILES)
    ]


def array_of(sums: list[list[Any]], like: Any) -> Any:
    two = ir.VectorType.get((2,), f32())
    pairs = np.empty((TILES, 2), dtype=object)
    for tile, half in np.ndindex(TILES, 2):
        pairs[tile, half] = vector.from_elements(two, sums[tile][2 * half : 2 * half + 2])
    registers = pairs.reshape(like.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _constant(value: int) -> Any:
    return utils.c(value, _i32())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def f32() -> Any:
    return ir.F32Type.get()
