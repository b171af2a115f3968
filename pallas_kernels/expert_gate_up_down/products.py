"""Products of a block of weights in 8-bit or 4-bit floats and x, of one warpgroup of Hopper GPUs.

Each warp has a quarter of the block's inputs. The products are those of single warps (see
warp_products.py); threads have the same weights as for those of warpgroups, so weights are stored
and widened as for packed_expert_product. Scales that are floats are shared by all inputs of a warp
and multiply its sums; those that are bytes multiply weights, which is exact.

Arrays SUMS are of a warpgroup: entry [TILE * w + o, r] is of the inputs of warp w, of output o and
row r.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.expert_gate_up_down.plan import GROUP, ROWS, TILE, WARPS, PhaseName, Stored
from pallas_kernels.four_bits import widened_scales
from pallas_kernels.packed_expert_product.widening import (
    E4M3_POWER,
    HALF,
    SHIFTS,
    SUMS_OF_SCALED,
    e2m1_pairs,
    float8_pairs,
    scale_pair,
)
from pallas_kernels.packed_experts import numbers_of
from pallas_kernels.shared_memory import LINE, TILE_ROWS, swizzled
from pallas_kernels.warp_products import load_matrices, multiply_add, shared_address
from pallas_kernels.words import Word

SUMS = (WARPS * TILE, ROWS)
WEIGHT_TRANSFORMS = swizzled(LINE, 8)
X_TRANSFORMS = swizzled(LINE // 2, 16)
SPAN = 32  # inputs of a lane's four columns
INPUTS = 16  # of a product of a warp
_CHUNK = 16  # bytes that a swizzle moves as one: 16 or 32 weights, or 8 entries of x
_ENTRIES = 8  # of x in a chunk
_TILE_BYTES = TILE_ROWS * LINE
_QUAD = 4  # lanes that have the same output
_QUADS = 0x1C1F  # of a shuffle: lanes are counted within each four


class Places(NamedTuple):
    """Where the scales of a tile's outputs are: of the first half, and of the second.

    Attributes:
      first, second: where those of the first inputs begin; bytes of the outputs of a half follow
        each other.
      by_column: from there to those of the next inputs.
    """

    first: Array
    second: Array
    by_column: int


def no_sums(*, interpret: bool) -> Array:
    zeros = jnp.zeros(SUMS, jnp.float32)
    return zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def block_sums(
    name: PhaseName,
    stored: Stored,
    values: Any,
    x: Any,
    first: Array,
    scales: Array,
    *,
    interpret: bool,
) -> Array:
    """The sums of a block: float32 SUMS; of scales that are bytes, over SUMS_OF_SCALED.

    Args:
      values: uint8 [2, TILE / 2, bytes], laid out as WEIGHT_TRANSFORMS.
      x: of gate and up, bfloat16 [ROWS, H] in shared memory, laid out as X_TRANSFORMS; of down,
        the units of all slots [n, ROWS, SPAN] in device memory, as ``unit_place`` says.
      first: of the block's inputs, in spans.
      scales: a result of ``block_scales``.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        weights = numbers_of(values[...], stored.code).reshape(TILE, WARPS, -1)
        inputs = weights.shape[1] * weights.shape[2]
        if stored.has_bytes:
            weights *= _by_input(scales, weights.shape[2])
        rows = _rows_in_order(name, x, first, inputs).reshape(ROWS, WARPS, -1)
        sums = jnp.einsum("owk,rwk->wor", weights, rows.astype(jnp.float32)).reshape(SUMS)
        return sums / SUMS_OF_SCALED if stored.has_bytes else sums * scales
    x_transforms = (X_TRANSFORMS,) if name == "gate_up" else ()
    refs = plgpu.RefType(WEIGHT_TRANSFORMS), plgpu.RefType(*x_transforms)
    types = *refs, plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WGMMA
    emit = functools.partial(_emit_sums, name=name, stored=stored)
    found = _of_warpgroup(emit, types, jnp.float32)(values, x, first, scales)
    return found if stored.has_bytes else found * scales


def block_scales(
    stored: Stored, scale: Any, places: Places, start: Array, inputs: int, *, interpret: bool
) -> Array:
    """The scales of a block, SUMS, as ``block_sums`` takes them: float32; or int32, of which a lane
    has the bytes of one group of its warp's inputs. So a lane loads two numbers of a block, and
    none of them is used before the block is multiplied: nobody waits for them earlier.

    Args:
      scale: float32 or uint8 [n] in device memory.
      start: the block's first input.
      inputs: of a warp.
    """
    if interpret:
        return _scales_interpreted(stored, scale[...], places, start, inputs)
    emit = functools.partial(_emit_scales, stored=stored, inputs=inputs, by_column=places.by_column)
    types = plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 3
    dtype = jnp.int32 if stored.has_bytes else jnp.float32
    return _of_warpgroup(emit, types, dtype)(scale, places.first, places.second, start)


def _scales_interpreted(
    stored: Stored, scale: Array, places: Places, start: Array, inputs: int
) -> Array:
    columns = (start + inputs * jnp.arange(WARPS)) // stored.scaled[1]
    rows = [place + columns * places.by_column for place in (places.first, places.second)]
    outputs = jnp.arange(TILE // 2) * stored.has_bytes  # others are the same for all of a half
    at = jnp.stack(rows, axis=1)[..., None] + outputs  # [WARPS, 2, TILE / 2]
    found = scale[at]
    if stored.has_bytes:
        groups = [scale[at + group * places.by_column] for group in range(inputs // GROUP)]
        shifted = [byte.astype(jnp.int32) << 8 * group for group, byte in enumerate(groups)]
        found = functools.reduce(jnp.bitwise_or, shifted)
    return jnp.broadcast_to(found.reshape(-1, 1), SUMS)


def _by_input(scales: Array, inputs: int) -> Array:
    """The factors of a block's weights [TILE, WARPS, inputs] of bytes in words."""
    words = scales[:, 0].reshape(WARPS, TILE)
    groups = [words >> 8 * group & 255 for group in range(inputs // GROUP)]
    factors = widened_scales(jnp.stack(groups, axis=-1).astype(jnp.uint8))
    return jnp.repeat(factors, GROUP, axis=-1).swapaxes(0, 1)


def _of_warpgroup(emit: Any, types: Any, dtype: Any) -> Any:
    """A function of arguments of such types, which ``emit`` writes: an array SUMS."""
    result: Any = plgpu.ShapeDtypeStruct(SUMS, jnp.dtype(dtype), layout=plgpu.Layout.WGMMA)
    inlined: Any = plgpu.inline_mgpu(arg_types=tuple(types), return_type=result)
    return inlined(emit)


def _rows_in_order(name: PhaseName, x: Any, first: Array, inputs: int) -> Array:
    """Entries [ROWS, inputs] of x, in input order."""
    if name == "gate_up":
        return lax.dynamic_slice(x[...], (0, first * SPAN), (ROWS, inputs))
    spans = lax.dynamic_slice(x[...], (first, 0, 0), (inputs // SPAN, ROWS, SPAN))
    pairs = spans.reshape(-1, ROWS, 4, SPAN // 8, 2)  # as ``unit_place`` says
    return pairs.transpose(1, 0, 3, 2, 4).reshape(ROWS, inputs)


def _emit_sums(
    _: Any, values: Any, x: Any, first: Any, scales: Any, *, name: PhaseName, stored: Stored
) -> Any:
    *_, row = _shape(values)
    inputs = row * 8 // stored.bits // WARPS
    thread = Word(mgpu.thread_idx()) % 128
    lane, warp = thread % 32, Word(utils.warp_idx(sync=True)) % WARPS
    begin = Word(first.registers.item()) + warp * (inputs // SPAN)
    read = _shared_columns if name == "gate_up" else _unit_columns
    columns = [column for span in range(inputs // SPAN) for column in read(x, lane, begin + span)]
    factors = _factors(scales, stored, inputs // GROUP)
    base = shared_address(values)
    sums, products = [[utils.c(0.0, ir.F32Type.get())] * 4] * stored.sums, 0
    for pair in range(row // WARPS // (2 * _CHUNK)):
        words = load_matrices(base + weight_chunk(lane, warp, pair, row))
        for chunk in range(2):
            halves = words[2 * chunk : 2 * chunk + 2]
            group = products * INPUTS // GROUP
            wide = [
                _widened(half, stored, by[group]) for half, by in zip(halves, factors, strict=True)
            ]
            for at in range(0, len(wide[0]), 2):
                of_product = [pairs[at : at + 2] for pairs in wide]
                second = columns[2 * products : 2 * products + 2]
                turn = products % len(sums)
                sums[turn] = multiply_add(sums[turn], first_operand(of_product), second)
                products += 1
    total = [functools.reduce(arith.addf, terms) for terms in zip(*sums, strict=True)]
    return _array([total[:2], total[2:]], ir.F32Type.get())


def _widened(word: Any, stored: Stored, factor: Any) -> list[Any]:
    """The pairs of bfloat16 of a word, times a factor."""
    pairs_of = float8_pairs if stored.code == "e4m3" else e2m1_pairs
    pairs = [_as_pair(pair.value) for pair in pairs_of(Word(word))]
    return [utils.bitcast(arith.mulf(pair, factor), _i32()) for pair in pairs]


def _factors(scales: Any, stored: Stored, groups: int) -> list[list[Any]]:
    """What weights are multiplied by, two bfloat16 for each group of a warp's inputs: of a thread's
    first output, and of its second."""
    if not stored.has_bytes:
        return [[_as_pair(utils.c(E4M3_POWER * HALF, _i32()))] * groups] * 2
    bytes_of = [Word(vector.extract(half, [], [0])) for half in scales.registers.flat]
    pairs = [scale_pair(byte, "e8m0", SHIFTS[stored.code]) for byte in bytes_of]
    return [[_as_pair(_of_quad(pair.value, group)) for group in range(groups)] for pair in pairs]


def _of_quad(word: Any, lane: int) -> Any:
    """What a lane of every four has."""
    move = f"shfl.sync.idx.b32 $0, $1, {lane}, {_QUADS}, 0xffffffff;"
    return utils.inline_ptx(move, word, result_types=_i32(), has_side_effects=True, convergent=True)


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
    _: Any,
    scale: Any,
    first: Any,
    second: Any,
    start: Any,
    *,
    stored: Stored,
    inputs: int,
    by_column: int,
) -> Any:
    lane, warp = Word(mgpu.thread_idx()) % 32, Word(utils.warp_idx(sync=True)) % WARPS
    column = (Word(start.registers.item()) + warp * inputs) // stored.scaled[1]
    halves = []
    for row in (first, second):
        place = Word(row.registers.item()) + column * by_column
        if stored.has_bytes:
            group = lane % _QUAD % (inputs // GROUP)
            byte = _byte(_entry(scale, place + lane // _QUAD + group * by_column))
            halves.append([byte] * 2)
        else:
            number = llvm.load(ir.F32Type.get(), _entry(scale, place), alignment=4)
            halves.append([number] * 2)
    return _array(halves, _i32() if stored.has_bytes else ir.F32Type.get())


def _byte(address: Any) -> Any:
    """A byte, wide. Those of the next jobs are read into the cache with it: behind the many
    weights that are on their way, each read of memory takes long."""
    load = "ld.global.nc.L2::256B.u8 $0, [$1];"
    return utils.inline_ptx(load, address, result_types=_i32(), has_side_effects=True)


def _entry(ref: Any, place: Word) -> Any:
    """The address of an entry."""
    dtype = ir.MemRefType(ref.type).element_type
    return utils.getelementptr(utils.memref_ptr(ref), [place.value], dtype)


# Where lanes find what they multiply: on MLIR's values, and in the tests on numbers.


def weight_chunk(lane: Any, warp: Any, pair: int, row: int) -> Any:
    """What ``load_matrices`` loads of a block with rows of so many bytes: 16 bytes of the first 8
    outputs and of the other 8, and the next 16; in bytes from its start.

    ``pair``: which 32 of a warp's bytes.
    """
    start = warp * (row // WARPS // _CHUNK) + (lane // 16 + 2 * pair)
    tile = lane // 8 % 2 * (row // LINE) + start // (LINE // _CHUNK)
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


def _array(halves: list[list[Any]], dtype: Any) -> Any:
    """An array SUMS; ``halves``: a thread's two rows of its first output, and of its second."""
    registers = np.empty(2, dtype=object)
    for at, half in enumerate(halves):
        registers[at] = vector.from_elements(ir.VectorType.get((2,), dtype), half)
    layout, is_signed = mgpu.WGMMA_LAYOUT, None if dtype == ir.F32Type.get() else True
    shaped = registers.reshape(layout.registers_shape(SUMS))
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=is_signed)


def _shape(ref: Any) -> Any:
    """The shape of a block, whose tiles are dimensions by themselves."""
    rows, tiles, columns, _, line = ir.MemRefType(ref.type).shape
    return rows, tiles, columns * line


def _as_pair(word: Any) -> Any:
    return utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get()))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
