"""Rows of x in the shared memory of Hopper GPUs, normed on their way there."""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.grid_barrier import gather
from pallas_kernels.o_gate_up_down.plan import WARPS
from pallas_kernels.o_gate_up_down.products import X_TRANSFORMS, entry_chunk
from pallas_kernels.warp_products import shared_address
from pallas_kernels.words import Word

ENTRIES = 8  # of a row that a thread has side by side
THREADS = 128  # of a warpgroup
NORM_PART = 256  # entries of the norm's weights in a row of their array


def put_normed(
    source: Any,
    weight: Any,
    x: Any,
    sums: Any,
    first: Array,
    *,
    step: int,
    eps: float,
    interpret: bool,
) -> None:
    """Write the RMS norms of rows of ``source`` to x, in one warpgroup.

    They are the row ``first`` and those that follow it in steps, as many as ``sums`` has places.
    All of them are read at the same time, so they take little longer than one.

    Args:
      source: bfloat16 [rows, H] in device memory, H a multiple of ENTRIES * THREADS.
      weight: bfloat16 [H / NORM_PART, NORM_PART] in shared memory.
      x: bfloat16 [ROWS, H] in shared memory, laid out as X_TRANSFORMS; nobody reads it yet.
      sums: float32 [n, WARPS] in shared memory, of this warpgroup.
    """
    if interpret:  # the interpreter does not support inlined MLIR
        for turn in range(sums.shape[0]):
            _norm_interpreted(source, weight, x, first + step * turn, eps)
        return
    plain: Any = plgpu.RefType()
    types = plain, plain, plgpu.RefType(X_TRANSFORMS), plain, plgpu.Layout.WG_SPLAT(())
    inlined: Any = plgpu.inline_mgpu(arg_types=types)
    inlined(functools.partial(_emit, step=step, eps=eps))(source, weight, x, sums, first)


def _norm_interpreted(source: Any, weight: Any, x: Any, row: Array, eps: float) -> None:
    @pl.when(row < source.shape[0])
    def _():
        x[row, : source.shape[1]] = rms_norm(source[row], weight[...].reshape(-1), eps)


def _emit(
    _: Any, source: Any, weight: Any, x: Any, sums: Any, first: Any, *, step: int, eps: float
) -> None:
    (count, hidden), turns = (ir.MemRefType(ref.type).shape for ref in (source, sums))
    thread, first = Word(mgpu.thread_idx()) % THREADS, Word(first.registers.item())
    x, places = shared_address(x), shared_address(sums)
    chunks = [thread + THREADS * at for at in range(hidden // ENTRIES // THREADS)]
    rows = [first + step * turn for turn in range(turns[0])]
    read = [Word(arith.minui(row.value, word(count - 1))) * (hidden // ENTRIES) for row in rows]
    streams = [[load_entries(source, begin + chunk) for chunk in chunks] for begin in read]
    for turn, stream in enumerate(streams):
        store_sum(squares_of(stream), places + 4 * WARPS * turn, thread)
    gather()
    for turn, (row, stream) in enumerate(zip(rows, streams, strict=True)):
        scale = norm_factor(places + 4 * WARPS * turn, hidden, eps)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row.value, word(count))):
            for chunk, words in zip(chunks, stream, strict=True):
                normed = normed_entries(words, scale, load_entries(weight, chunk))
                store_words(x + entry_chunk(row, chunk), normed)


def squares_of(stream: list[Any]) -> Any:
    """The sum of the squares of a thread's entries."""
    wide = [widened(words) for words in stream]
    squares = functools.reduce(arith.addf, [arith.mulf(entries, entries) for entries in wide])
    terms = [vector.extract(squares, [], [at]) for at in range(ENTRIES)]
    return functools.reduce(arith.addf, terms)


def store_sum(value: Any, sums: Word, thread: Word, add: Any = arith.addf) -> None:
    """Store each warp's sum of a value, or what ``add`` makes of it."""
    for distance in (16, 8, 4, 2, 1):
        value = add(value, utils.shfl_bfly(value, distance))
    place = (sums + thread // 32 * 4).value
    utils.inline_ptx("st.shared.f32 [$0], $1;", place, value, has_side_effects=True)


def load_sums(sums: Word) -> list[Any]:
    """The sums that warps of a warpgroup have stored."""
    load = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    types = WARPS * [f32()]
    return list(utils.inline_ptx(load, sums.value, result_types=types, has_side_effects=True))


def norm_factor(sums: Word, hidden: int, eps: float) -> Any:
    """What a row's entries are multiplied by, of the warps' sums of their squares."""
    found = functools.reduce(arith.addf, load_sums(sums))
    mean = arith.mulf(found, utils.c(1 / hidden, f32()))
    biased = arith.addf(mean, utils.c(eps, f32()))
    root = utils.inline_ptx("rsqrt.approx.f32 $0, $1;", biased, result_types=f32())
    return vector.broadcast(_wide(), root)


def normed_entries(words: Any, factor: Any, weights: Any) -> Any:
    """Entries times a row's factor, and times the norm's weights, rounded after each."""
    entries = arith.mulf(widened(_kept(words)), factor)
    normed = arith.extf(_wide(), arith.truncf(_narrow(), entries))
    scaled = arith.truncf(_narrow(), arith.mulf(normed, widened(weights)))
    return utils.bitcast(scaled, _words())


def load_entries(ref: Any, chunk: Word) -> Any:
    """ENTRIES entries, two in a word."""
    at = utils.getelementptr(utils.memref_ptr(ref), [chunk.value], _words())
    return llvm.load(_words(), at, alignment=16)


def widened(words: Any) -> Any:
    return arith.extf(_wide(), utils.bitcast(words, _narrow()))


def _kept(words: Any) -> Any:
    """The same words, which the compiler cannot know to be widened already: so that registers hold
    them until then, and not twice as many floats."""
    moves = " ".join(f"mov.b32 ${at}, ${at + 4};" for at in range(4))
    parts = [vector.extract(words, [], [at]) for at in range(4)]
    types = 4 * [ir.IntegerType.get_signless(32)]
    moved = utils.inline_ptx(moves, *parts, result_types=types, has_side_effects=True)
    return vector.from_elements(_words(), moved)


def store_words(address: Word, words: Any) -> None:
    parts = [vector.extract(words, [], [at]) for at in range(4)]
    store = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
    utils.inline_ptx(store, address.value, *parts, has_side_effects=True)


def word(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _words() -> Any:
    return ir.VectorType.get((4,), ir.IntegerType.get_signless(32))


def _narrow() -> Any:
    return ir.VectorType.get((ENTRIES,), ir.BF16Type.get())


def _wide() -> Any:
    return ir.VectorType.get((ENTRIES,), f32())


def f32() -> Any:
    return ir.F32Type.get()
