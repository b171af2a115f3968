"""Rows of x in the shared memory of Hopper GPUs, normed on their way there."""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.o_gate_up_down.products import X_TRANSFORMS, entry_chunk, shared_address
from pallas_kernels.words import Word

ENTRIES = 8  # of a row that a thread has side by side
THREADS = 128  # of a warpgroup


def put_normed(
    source: Any, weight: Any, x: Any, sums: Any, row: Array, eps: float, *, interpret: bool
) -> None:
    """Write the RMS norm of a row of ``source`` to x, in one warpgroup, which must not be read yet.

    Args:
      source: bfloat16 [rows, H] in device memory, H a multiple of ENTRIES * THREADS.
      weight: bfloat16 [H]
      x: bfloat16 [ROWS, H] in shared memory, laid out as X_TRANSFORMS.
      sums: float32 [4] in shared memory, of this warpgroup.
    """
    hidden = weight.shape[0]
    if interpret:  # the interpreter does not support inlined MLIR
        x[row, :hidden] = rms_norm(source[row], weight[...], eps)
        return
    plain: Any = plgpu.RefType()
    types = plain, plain, plgpu.RefType(X_TRANSFORMS), plain, plgpu.Layout.WG_SPLAT(())
    inlined: Any = plgpu.inline_mgpu(arg_types=types)
    inlined(functools.partial(_emit, hidden=hidden, eps=eps))(source, weight, x, sums, row)


def _emit(
    _: Any, source: Any, weight: Any, x: Any, sums: Any, row: Any, *, hidden: int, eps: float
) -> None:
    thread, row = Word(mgpu.thread_idx()) % THREADS, Word(row.registers.item())
    x = shared_address(x)
    chunks = [thread + THREADS * at for at in range(hidden // ENTRIES // THREADS)]
    stream = [_load(source, row * (hidden // ENTRIES) + chunk) for chunk in chunks]
    squares = functools.reduce(arith.addf, [arith.mulf(entries, entries) for entries in stream])
    terms = [vector.extract(squares, [], [at]) for at in range(ENTRIES)]
    total = _sum_of_warpgroup(functools.reduce(arith.addf, terms), shared_address(sums), thread)
    mean = arith.mulf(total, utils.c(1 / hidden, _f32()))
    biased = arith.addf(mean, utils.c(eps, _f32()))
    root = utils.inline_ptx("rsqrt.approx.f32 $0, $1;", biased, result_types=_f32())
    scale = vector.broadcast(_wide(), root)
    for chunk, entries in zip(chunks, stream, strict=True):
        normed = arith.extf(_wide(), arith.truncf(_narrow(), arith.mulf(entries, scale)))
        scaled = arith.truncf(_narrow(), arith.mulf(normed, _load(weight, chunk)))
        _store_shared(x + entry_chunk(row, chunk), utils.bitcast(scaled, _words()))


def _sum_of_warpgroup(value: Any, sums: Word, thread: Word) -> Any:
    """Over all threads, in the same order for each."""
    for distance in (16, 8, 4, 2, 1):
        value = arith.addf(value, utils.shfl_bfly(value, distance))
    place = (sums + thread // 32 * 4).value
    utils.inline_ptx("st.shared.f32 [$0], $1;", place, value, has_side_effects=True)
    utils.warpgroup_barrier()
    load = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    types = 4 * [_f32()]
    found = utils.inline_ptx(load, sums.value, result_types=types, has_side_effects=True)
    utils.warpgroup_barrier()  # before the next row's sums are written there
    return functools.reduce(arith.addf, found)


def _load(ref: Any, chunk: Word) -> Any:
    """ENTRIES entries, in float32."""
    at = utils.getelementptr(utils.memref_ptr(ref), [chunk.value], _words())
    return arith.extf(_wide(), utils.bitcast(llvm.load(_words(), at, alignment=16), _narrow()))


def _store_shared(address: Word, words: Any) -> None:
    parts = [vector.extract(words, [], [at]) for at in range(4)]
    store = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
    utils.inline_ptx(store, address.value, *parts, has_side_effects=True)


def _words() -> Any:
    return ir.VectorType.get((4,), ir.IntegerType.get_signless(32))


def _narrow() -> Any:
    return ir.VectorType.get((ENTRIES,), ir.BF16Type.get())


def _wide() -> Any:
    return ir.VectorType.get((ENTRIES,), _f32())


def _f32() -> Any:
    return ir.F32Type.get()
