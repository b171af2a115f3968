"""Rows rounded to 8-bit floats on their way to the shared memory of Hopper GPUs.

Scales are those of round_tokens: the largest entry of a row, or of a group of its entries, becomes
448. Every thread block rounds all rows that it multiplies. Of hidden units it has a part only, so
thread blocks tell each other the largest ones that they made, where rows have one scale.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.float8 import LARGEST
from pallas_kernels.grid_barrier import gather
from pallas_kernels.o_gate_up_down.float8_products import TRANSFORMS
from pallas_kernels.o_gate_up_down.outputs import as_bfloat16
from pallas_kernels.o_gate_up_down.plan import GROUP, ROWS, WARPS
from pallas_kernels.o_gate_up_down.products import entry_chunk, load_f32
from pallas_kernels.o_gate_up_down.rows import (
    ENTRIES,
    THREADS,
    f32,
    load_entries,
    load_sums,
    norm_factor,
    normed_entries,
    squares_of,
    store_sum,
    widened,
    word,
)
from pallas_kernels.round_tokens.reference import SMALLEST, rounded_by, scale_of
from pallas_kernels.warp_products import shared_address
from pallas_kernels.words import Word

_SUMS_BYTES = 4 * WARPS
_CHUNKS = GROUP // ENTRIES  # of a group


class Source(NamedTuple):
    """Rows that are read.

    Attributes:
      array: bfloat16 [rows, ...] in device memory.
      start: first column, a multiple of ENTRIES.
      norm: bfloat16 [width / NORM_PART, NORM_PART] in shared memory: weights of a norm before they
        are rounded; None: they are not normed.
      largest: float32 [blocks, ROWS] in device memory: the largest entries of rows, each of a part
        of them; None: of the columns that are read.
    """

    array: Any
    start: Array
    norm: Any = None
    largest: Any = None


class Place(NamedTuple):
    """Where rounded rows are put, in shared memory.

    Attributes:
      x: e4m3 [ROWS, ...], laid out as TRANSFORMS; nobody reads it yet.
      scales: float32 [ROWS], or [ROWS, ...] of groups.
      sums: float32 [2 n, WARPS], of the warpgroup, for n rows.
    """

    x: Any
    scales: Any
    sums: Any


def put_rounded(
    source: Source,
    place: Place,
    first: Array,
    *,
    step: int,
    width: int,
    eps: float,
    interpret: bool,
) -> None:
    """Put rows of ``width`` columns where they are multiplied, in one warpgroup: the row ``first``
    and those that follow it in steps. All of them are read at the same time."""
    if interpret:  # the interpreter does not support inlined MLIR
        for turn in range(place.sums.shape[0] // 2):
            _round_interpreted(source, place, first + step * turn, width, eps)
        return
    plain: Any = plgpu.RefType()
    scalar = plgpu.Layout.WG_SPLAT(())
    others = [ref for ref in (source.norm, source.largest) if ref is not None]
    types = plain, plgpu.RefType(TRANSFORMS), plain, plain, scalar, scalar, *[plain] * len(others)
    emit = _Rounding(step, width, eps, source.norm is not None, source.largest is not None)
    inlined: Any = plgpu.inline_mgpu(arg_types=types)
    inlined(emit.emit)(source.array, *place, first, source.start, *others)


def _round_interpreted(source: Source, place: Place, row: Array, width: int, eps: float) -> None:
    @pl.when(row < source.array.shape[0])
    def _():
        wide = source.array[row, pl.ds(source.start, width)].astype(jnp.float32)
        if source.norm is not None:
            factor = lax.rsqrt(jnp.mean(wide * wide) + eps)
            weights = source.norm[...].reshape(-1).astype(jnp.float32)
            wide = as_bfloat16(as_bfloat16(wide * factor) * weights)
        if len(place.scales.shape) > 1:
            groups = wide.reshape(-1, GROUP)
            scale = scale_of(jnp.max(jnp.abs(groups), axis=-1))
            place.x[row, :width] = rounded_by(groups, scale[:, None]).reshape(-1)
            place.scales[row, : len(groups)] = scale
            return
        known = jnp.abs(wide) if source.largest is None else source.largest[...][:, row]
        scale = scale_of(jnp.max(known))
        place.x[row, :width] = rounded_by(wide, scale)
        place.scales[row] = scale


class _Rounding(NamedTuple):
    """What put_rounded inlines."""

    step: int
    width: int
    eps: float
    norms: bool
    knows_largest: bool

    def emit(
        self, _: Any, source: Any, x: Any, scales: Any, sums: Any, first: Any, start: Any, *others
    ) -> None:
        count, hidden = ir.MemRefType(source.type).shape
        turns = range(ir.MemRefType(sums.type).shape[0] // 2)
        first, start = (Word(index.registers.item()) for index in (first, start))
        thread, places = Word(mgpu.thread_idx()) % THREADS, shared_address(sums)
        rows = [first + self.step * turn for turn in turns]
        known = [_least(row, count - 1) for row in rows]
        chunks = self._chunks(thread)
        begins = [row * (hidden // ENTRIES) + start // ENTRIES for row in known]
        streams = [[load_entries(source, begin + chunk) for chunk in chunks] for begin in begins]
        if self.norms:
            streams = self._normed(streams, chunks, places, thread, others[0])
        _, *groups = ir.MemRefType(scales.type).shape
        scales_of_rows = [None] * len(turns)
        if not groups:
            scales_of_rows = self._scales(streams, known, places, thread, *others[-1:])
        for row, stream, of_row in zip(rows, streams, scales_of_rows, strict=True):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row.value, word(count))):
                for chunk, words in zip(chunks, stream, strict=True):
                    scale = of_row or _scale(_largest_of_group(words))
                    place = entry_chunk(row, chunk // 2) + chunk % 2 * ENTRIES
                    _store(shared_address(x) + place, _over(words, scale))
                    at = row * groups[0] + chunk // _CHUNKS if groups else row
                    _store_scale(shared_address(scales) + at * 4, scale)

    def _scales(
        self, streams: list[Any], rows: list[Word], places: Word, thread: Word, *largest: Any
    ) -> list[Any]:
        """Those of whole rows."""
        places += _SUMS_BYTES * len(streams)
        for turn, (row, stream) in enumerate(zip(rows, streams, strict=True)):
            most = _told(largest[0], row, thread) if self.knows_largest else _largest(stream)
            store_sum(most, places + _SUMS_BYTES * turn, thread, arith.maximumf)
        gather()
        found = [load_sums(places + _SUMS_BYTES * turn) for turn in range(len(streams))]
        return [_scale(functools.reduce(arith.maximumf, sums)) for sums in found]

    def _chunks(self, thread: Word) -> list[Word]:
        """Those of a thread. The last groups may be other threads', too, which do the same."""
        groups = self.width // GROUP
        places = [thread + THREADS * at for at in range(-(-groups * _CHUNKS // THREADS))]
        return [_least(at // _CHUNKS, groups - 1) * _CHUNKS + at % _CHUNKS for at in places]

    def _normed(
        self, streams: list[Any], chunks: list[Word], places: Word, thread: Word, weight: Any
    ) -> list[Any]:
        for turn, stream in enumerate(streams):
            store_sum(squares_of(stream), places + _SUMS_BYTES * turn, thread)
        gather()
        factors = [
            norm_factor(places + _SUMS_BYTES * turn, self.width, self.eps)
            for turn in range(len(streams))
        ]
        normed: list[Any] = [[] for _ in streams]
        for at, chunk in enumerate(chunks):
            weights = load_entries(weight, chunk)
            for stream, factor, row in zip(streams, factors, normed, strict=True):
                row.append(normed_entries(stream[at], factor, weights))
        return normed


def _least(value: Word, most: int) -> Word:
    return Word(arith.minui(value.value, word(most)))


def _told(largest: Any, row: Word, thread: Word) -> Any:
    """The largest entry of a row that this thread is told of."""
    blocks, _ = ir.MemRefType(largest.type).shape
    places = [_least(thread + THREADS * at, blocks - 1) for at in range(-(-blocks // THREADS))]
    values = [load_f32(largest, place * ROWS + row) for place in places]
    return functools.reduce(arith.maximumf, values)


def _largest_of_group(words: Any) -> Any:
    """The largest magnitude of the entries of the threads that have a group."""
    most = _largest([words])
    for distance in (8, 4, 2, 1):
        most = arith.maximumf(most, utils.shfl_bfly(most, distance))
    return most


def _largest(stream: list[Any]) -> Any:
    """The largest magnitude of a thread's entries."""
    wide = [widened(words) for words in stream]
    most = functools.reduce(arith.maximumf, [arith.maximumf(x, arith.negf(x)) for x in wide])
    return functools.reduce(
        arith.maximumf, [vector.extract(most, [], [at]) for at in range(ENTRIES)]
    )


def _scale(largest: Any) -> Any:
    """round_tokens.reference.scale_of."""
    above = arith.cmpf(arith.CmpFPredicate.OGT, largest, utils.c(SMALLEST, f32()))
    chosen = arith.select(above, largest, utils.c(1.0, f32()))
    return arith.mulf(chosen, utils.c(1 / LARGEST, f32()))


def _over(words: Any, scale: Any) -> Any:
    """Entries over a scale, as round_tokens.reference.rounded_by has them before it rounds."""
    inverse = arith.divf(utils.c(1.0, f32()), scale)
    return arith.mulf(widened(words), vector.broadcast(_wide(), inverse))


def _store_scale(address: Word, scale: Any) -> None:
    """Several threads store the same."""
    store = "st.shared.f32 [$0], $1;"
    utils.inline_ptx(store, address.value, scale, has_side_effects=True)


def _store(address: Word, entries: Any) -> None:
    """Round entries to e4m3, saturated, and store them."""
    values = [vector.extract(entries, [], [at]) for at in range(ENTRIES)]
    convert = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    i32 = ir.IntegerType.get_signless(32)
    halves = [utils.inline_ptx(convert, *values[at : at + 4], result_types=i32) for at in (0, 4)]
    store = "st.shared.v2.b32 [$0], {$1, $2};"
    utils.inline_ptx(store, address.value, *halves, has_side_effects=True)


def _wide() -> Any:
    return ir.VectorType.get((ENTRIES,), f32())
