"""Query rows on their way to shared memory, for the kernel in mosaic_gpu.py."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import kernel_axes
from pallas_kernels.paged_attention.plan import AttentionPlan, Work
from pallas_kernels.paged_attention.tuning import ROWS
from pallas_kernels.shared_memory import LINE, STORE, SWIZZLED, THREADS, TILE_ROWS
from pallas_kernels.words import Word

CHUNK = STORE // 2  # entries that a thread loads and stores at once
STEP = 8  # chunks that a thread loads before it stores any


def load_queries(plan: AttentionPlan, work: Work, q: Any, tile: Array, refs: Any) -> None:
    """Load the tile's rows [ROWS, D] to shared memory, as wgmma reads them. Rows past its tokens
    are undefined. (Operands in registers would occupy them during the whole kernel.)"""
    load = _gather_rows if plan.large else _copy_rows
    load(plan, work, q, tile, refs)
    plgpu.commit_smem()


def _copy_rows(plan: AttentionPlan, work: Work, q: Any, tile: Array, refs: Any) -> None:
    """TMA copies a few rows per token, without a swizzle. They are then stored again."""
    warpgroup = kernel_axes.index("warpgroup")
    full, rows = refs["q_full"].at[warpgroup], refs["rows"].at[warpgroup]

    @pl.loop(0, plan.tokens)
    def _copy(i):
        token = jnp.minimum(tile * plan.tokens + i, plan.num_tokens - 1)
        plgpu.copy_gmem_to_smem(
            q.at[work.sequence, token, pl.ds(work.kv_head * plan.group, plan.group)],
            rows.at[pl.ds(i * plan.group, plan.group)],
            full,
        )

    plgpu.barrier_wait(full)
    tiled = refs["queries"].at[warpgroup]
    tiled[...] = plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)


def _gather_rows(plan: AttentionPlan, work: Work, q: Any, tile: Array, refs: Any) -> None:
    """Threads load rows and store them where they stay. It needs no other memory."""
    tiled = refs["queries"].at[kernel_axes.index("warpgroup")]
    first, head = tile * plan.tokens, work.kv_head * plan.group
    if plan.interpret:  # the interpreter does not support inlined MLIR
        for i in range(plan.tokens):
            token = jnp.minimum(first + i, plan.num_tokens - 1)
            rows = q[work.sequence, token, pl.ds(head, plan.group)]
            tiled[pl.ds(i * plan.group, plan.group)] = rows
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    types = plgpu.RefType(), plgpu.RefType(SWIZZLED), *3 * [scalar]
    inlined: Any = plgpu.inline_mgpu(arg_types=types)(functools.partial(_emit, group=plan.group))
    inlined(q, tiled, work.sequence, first, head)


def _emit(_: Any, q: Any, tiled: Any, sequence: Any, first: Any, head: Any, *, group: int) -> None:
    """Rows from token ``first`` and head ``head`` on; past the last token, that one's."""
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    chunk = ir.VectorType.get((STORE // 4,), i32)
    _, num_tokens, num_heads, width = ir.MemRefType(q.type).shape
    sequence, first, head = (Word(x.registers.item()) for x in (sequence, first, head))
    source, target = utils.memref_ptr(q), utils.memref_ptr(tiled)
    places = list(chunk_places(Word(mgpu.thread_idx()), width))
    for start in range(0, len(places), STEP):
        step, loaded = places[start : start + STEP], []
        for row, column, _ in step:
            token = Word(arith.minui((first + row // group).value, utils.c(num_tokens - 1, i32)))
            index = (sequence * num_tokens + token) * num_heads + head + row % group
            at = index * (width // CHUNK) + column
            loaded.append(llvm.load(chunk, utils.getelementptr(source, [at.value], chunk)))
        for (*_, place), values in zip(step, loaded, strict=True):
            llvm.store(values, utils.getelementptr(target, [place.value], i8))


# The arithmetic of a thread, on MLIR's values, and in the tests on numbers.


def chunk_places(thread: Any, width: int) -> Iterator[tuple[Any, Any, Any]]:
    """A thread's chunks of a tile [ROWS, width]: their rows, their indices among the row's chunks,
    and where they are in tiles of a swizzle, in bytes from the start. A warp has whole rows."""
    chunks = width // CHUNK  # of a row
    line_chunks = LINE // STORE
    thread = thread % THREADS
    for turn in range(ROWS * chunks // THREADS):
        index = thread + turn * THREADS
        row, column = index // chunks, index % chunks
        tile = row // TILE_ROWS * (chunks // line_chunks) + column // line_chunks
        line = tile * TILE_ROWS + row % TILE_ROWS
        place = line * LINE + (column % line_chunks ^ row % TILE_ROWS) * STORE
        yield row, column, place
