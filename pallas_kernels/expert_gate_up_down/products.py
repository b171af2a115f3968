"""Products of a block of weights in 8-bit floats and x, of one warpgroup of Hopper GPUs.

Each warp has a quarter of the block's inputs, all of which share a scale. The products are those of
single warps (see warp_products.py); threads have the same weights as for those of warpgroups, so
weights are stored and widened as for packed_expert_product.

Sums of a warpgroup are an array SUMS: entry [TILE * w + o, r] is the sum over the inputs of warp w,
of output o and row r.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.expert_gate_up_down.plan import ROWS, TILE, WARPS, PhaseName
from pallas_kernels.packed_expert_product.widening import E4M3_POWER, HALF, float8_pairs
from pallas_kernels.packed_experts import numbers_of
from pallas_kernels.shared_memory import LINE, TILE_ROWS, swizzled
from pallas_kernels.warp_products import load_matrices, multiply_add, shared_address
from pallas_kernels.words import Word

SUMS = (WARPS * TILE, ROWS)
WEIGHT_TRANSFORMS = swizzled(LINE, 8)
X_TRANSFORMS = swizzled(LINE // 2, 16)
SPAN = 32  # inputs of a lane's four columns
_CHUNK = 16  # bytes that a swizzle moves as one: 16 weights, or 8 entries of x
_ENTRIES = 8  # of x in a chunk
_TILE_BYTES = TILE_ROWS * LINE


def no_sums(*, interpret: bool) -> Array:
    zeros = jnp.zeros(SUMS, jnp.float32)
    return zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def block_sums(name: PhaseName, values: Any, x: Any, first: Array, *, interpret: bool) -> Array:
    """The sums of a block, not scaled: float32 SUMS.

    Args:
      values: uint8 [2, TILE / 2, inputs], laid out as WEIGHT_TRANSFORMS.
      x: of gate and up, bfloat16 [ROWS, H] in shared memory, laid out as X_TRANSFORMS; of down,
        the units of all slots [n, ROWS, SPAN] in device memory, as ``unit_place`` says.
      first: of the block's inputs, in spans.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        weights = numbers_of(values[...], "e4m3").reshape(TILE, WARPS, -1)
        inputs = weights.shape[1] * weights.shape[2]
        rows = _rows_in_order(name, x, first, inputs).reshape(ROWS, WARPS, -1)
        return jnp.einsum("owk,rwk->wor", weights, rows.astype(jnp.float32)).reshape(SUMS)
    x_transforms = (X_TRANSFORMS,) if name == "gate_up" else ()
    types = plgpu.RefType(WEIGHT_TRANSFORMS), plgpu.RefType(*x_transforms)
    return _of_warpgroup(functools.partial(_emit_sums, name=name), *types)(values, x, first)


def block_scales(
    scale: Any,
    rows: tuple[Array, Array],
    start: Array,
    inputs: int,
    sharing: int,
    *,
    interpret: bool,
) -> Array:
    """What a block's sums are multiplied by: float32 SUMS.

    Args:
      scale: float32 [n] in device memory.
      rows: where those of the outputs in the tile's first half begin, and in its second half.
      start: the block's first input.
      inputs: of a warp.
      sharing: inputs that share a scale.
    """
    if interpret:
        columns = (start + inputs * jnp.arange(WARPS)) // sharing
        halves = [scale[...][row + columns] for row in rows]
        by_output = jnp.repeat(jnp.stack(halves, axis=1), TILE // 2, axis=1)  # [WARPS, TILE]
        return jnp.broadcast_to(by_output.reshape(-1, 1), SUMS)
    emit = functools.partial(_emit_scales, inputs=inputs, sharing=sharing)
    return _of_warpgroup(emit, plgpu.RefType())(scale, *rows, start)


def _of_warpgroup(emit: Any, *types: Any) -> Any:
    """A function of refs of such types, and of numbers, which ``emit`` writes: an array SUMS."""

    def call(*arguments: Any) -> Array:
        splats = [plgpu.Layout.WG_SPLAT(())] * (len(arguments) - len(types))
        result: Any = plgpu.ShapeDtypeStruct(SUMS, jnp.dtype("float32"), layout=plgpu.Layout.WGMMA)
        inlined: Any = plgpu.inline_mgpu(arg_types=(*types, *splats), return_type=result)
        return inlined(emit)(*arguments)

    return call


def _rows_in_order(name: PhaseName, x: Any, first: Array, inputs: int) -> Array:
    """Entries [ROWS, inputs] of x, in input order."""
    if name == "gate_up":
        return lax.dynamic_slice(x[...], (0, first * SPAN), (ROWS, inputs))
    spans = lax.dynamic_slice(x[...], (first, 0, 0), (inputs // SPAN, ROWS, SPAN))
    pairs = spans.reshape(-1, ROWS, 4, SPAN // 8, 2)  # as ``unit_place`` says
    return pairs.transpose(1, 0, 3, 2, 4).reshape(ROWS, inputs)


def _emit_sums(_: Any, values: Any, x: Any, first: Any, *, name: PhaseName) -> Any:
    *_, inputs = _shape(values)
    part = inputs // WARPS
    thread = Word(mgpu.thread_idx()) % 128
    lane, warp = thread % 32, Word(utils.warp_idx(sync=True)) % WARPS
    begin = Word(first.registers.item()) + warp * (part // SPAN)
    read = _shared_columns if name == "gate_up" else _unit_columns
    columns = [column for span in range(part // SPAN) for column in read(x, lane, begin + span)]
    base = shared_address(values)
    sums = [utils.c(0.0, ir.F32Type.get())] * 4
    for pair in range(part // 32):
        words = load_matrices(base + weight_chunk(lane, warp, pair, inputs))
        for chunk in range(2):
            wide = [_widened(word) for word in words[2 * chunk : 2 * chunk + 2]]
            at = 4 * pair + 2 * chunk
            sums = multiply_add(sums, first_operand(wide), columns[at : at + 2])
    return _array([sums[:2], sums[2:]])


def _widened(word: Any) -> list[Any]:
    """Two pairs of bfloat16."""
    power = _as_pair(utils.c(E4M3_POWER * HALF, _i32()))
    pairs = [_as_pair(pair.value) for pair in float8_pairs(Word(word))]
    return [utils.bitcast(arith.mulf(pair, power), _i32()) for pair in pairs]


def first_operand(wide: Any) -> list[Any]:
    """The pairs of 16 inputs; ``wide``: those of the first output, and of the second."""
    return [wide[output][column] for column in range(2) for output in range(2)]


def _shared_columns(x: Any, lane: Word, span: Word) -> list[Any]:
    return load_matrices(shared_address(x) + row_chunk(lane, span))


def _unit_columns(units: Any, lane: Word, span: Word) -> list[Any]:
    place = (span * ROWS * SPAN + lane * _ENTRIES).value
    at = utils.getelementptr(utils.memref_ptr(units), [place], ir.BF16Type.get())
    words = llvm.load(ir.VectorType.get((4,), _i32()), at, alignment=_CHUNK)
    return [vector.extract(words, [], [at]) for at in range(4)]


def _emit_scales(
    _: Any, scale: Any, first: Any, second: Any, start: Any, *, inputs: int, sharing: int
) -> Any:
    warp = Word(utils.warp_idx(sync=True)) % WARPS
    column = (Word(start.registers.item()) + warp * inputs) // sharing
    halves = []
    for row in (first, second):
        place = (Word(row.registers.item()) + column).value
        at = utils.getelementptr(utils.memref_ptr(scale), [place], ir.F32Type.get())
        halves.append([llvm.load(ir.F32Type.get(), at, alignment=4)] * 2)
    return _array(halves)


# Where lanes find what they multiply: on MLIR's values, and in the tests on numbers.


def weight_chunk(lane: Any, warp: Any, pair: int, inputs: int) -> Any:
    """What ``load_matrices`` loads of a block of so many inputs: 16 inputs of the first 8 outputs
    and of the other 8, and the next 16; in bytes from its start.

    ``pair``: which 32 of a warp's inputs.
    """
    start = warp * (inputs // WARPS // _CHUNK) + (lane // 16 + 2 * pair)
    tile = lane // 8 % 2 * (inputs // LINE) + start // (LINE // _CHUNK)
    return _in_tile(tile, lane % 8, start % (LINE // _CHUNK))


def row_chunk(lane: Any, span: Any) -> Any:
    """Likewise a span of all rows of x, in four chunks."""
    chunk = span * (SPAN // _ENTRIES) + lane // 8
    return _in_tile(chunk // (LINE // _CHUNK), lane % 8, chunk % (LINE // _CHUNK))


def _in_tile(tile: Any, row: Any, chunk: Any) -> Any:
    return tile * _TILE_BYTES + row * LINE + (chunk ^ row) * _CHUNK


def unit_place(unit: Any, row: Any) -> Any:
    """The entry of a unit among those of all slots, stored so that a lane reads its columns of a
    span at once: those of row lane / 4, four pairs of every eight, 2 (lane mod 4) and the next."""
    within = unit % SPAN
    column = within % 8 // 2 * _ENTRIES + within // 8 * 2 + within % 2
    return (unit // SPAN * ROWS + row) * SPAN + column


def _array(halves: list[list[Any]]) -> Any:
    """An array SUMS; ``halves``: a thread's two rows of its first output, and of its second."""
    two = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty(2, dtype=object)
    for at, half in enumerate(halves):
        registers[at] = vector.from_elements(two, half)
    layout = mgpu.WGMMA_LAYOUT
    shaped = registers.reshape(layout.registers_shape(SUMS))
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None)


def _shape(ref: Any) -> Any:
    """The shape of a block, whose tiles are dimensions by themselves."""
    rows, tiles, columns, _, line = ir.MemRefType(ref.type).shape
    return rows, tiles, columns * line


def _as_pair(word: Any) -> Any:
    return utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get()))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
