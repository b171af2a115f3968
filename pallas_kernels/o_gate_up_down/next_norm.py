"""The residual stream behind the MLP and its norm, of a row, on Hopper GPUs.

The multiplying warpgroups of a thread block share the row: so each thread has few entries, and all
partial sums are on their way at the same time.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import kernel_axes
from pallas_kernels.o_gate_up_down.plan import WARPS
from pallas_kernels.o_gate_up_down.products import shared_address
from pallas_kernels.o_gate_up_down.rows import THREADS, load_sums, store_sum
from pallas_kernels.products import total_f32
from pallas_kernels.round_tokens.row_parts import RowParts
from pallas_kernels.words import Word

_SUMS_BYTES = 4 * WARPS


def norm_row(
    parts: RowParts,
    row: Array,
    weight: Array,
    squares: Any,
    refs: dict[str, Any],
    *,
    eps: float,
    interpret: bool,
) -> None:
    """Store a row of the stream and its norm. All warpgroups that share it call this.

    Args:
      weight: the calling warpgroup's part of the norm's weights.
      squares: float32 [warpgroups, WARPS] in shared memory; each call needs its own.
      refs: "total", the stream before the MLP, and "partials", what is added to it; the results
        "stream" and "normed"; "row_squared", a barrier of the warpgroups.
    """
    stream, part = refs["stream"], parts.slice_of_part()
    before = parts.load(refs["total"].at[row]).astype(jnp.float32)
    splits = range(refs["partials"].shape[0])
    terms = [parts.load(refs["partials"].at[split, row]) for split in splits]
    added = total_f32(terms).astype(stream.dtype)  # rounded as an unsplit product is
    total = (before + added.astype(jnp.float32)).astype(stream.dtype)
    wide = total.astype(jnp.float32)  # from the rounded sum, as the reference does
    _store_sums(parts, wide * wide, squares, interpret)
    plgpu.barrier_arrive(refs["row_squared"])
    stream[row, part] = total
    plgpu.barrier_wait(refs["row_squared"])
    scale = lax.rsqrt(_total(squares, interpret) / parts.width + eps)
    refs["normed"][row, part] = (wide * scale).astype(stream.dtype) * weight


def _store_sums(parts: RowParts, part: Array, squares: Any, interpret: bool) -> None:
    """Store the sum of each warp of the calling warpgroup."""
    sums = squares.at[kernel_axes.index("warpgroup")]
    if interpret:  # the interpreter does not support inlined MLIR
        sums[0] = jnp.sum(part)
        return
    inlined: Any = plgpu.inline_mgpu(arg_types=(parts.layout, plgpu.RefType()))
    inlined(_emit_sums)(part, sums)


def _emit_sums(_: Any, part: Any, sums: Any) -> None:
    entries = functools.reduce(arith.addf, part.registers.flat)
    [count] = ir.VectorType(entries.type).shape
    terms = [vector.extract(entries, [], [at]) for at in range(count)]
    thread = Word(mgpu.thread_idx()) % THREADS
    store_sum(functools.reduce(arith.addf, terms), shared_address(sums), thread)


def _total(squares: Any, interpret: bool) -> Array:
    """The sum of all warps' sums."""
    if interpret:
        return jnp.sum(squares[...][:, 0])
    scalar: Any = plgpu.ShapeDtypeStruct((), jnp.dtype("float32"), layout=plgpu.Layout.WG_SPLAT(()))
    emit = functools.partial(_emit_total, warpgroups=squares.shape[0])
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=scalar)
    return inlined(emit)(squares)


def _emit_total(_: Any, squares: Any, *, warpgroups: int) -> Any:
    begin = shared_address(squares)
    found = [load_sums(begin + _SUMS_BYTES * at) for at in range(warpgroups)]
    total = functools.reduce(arith.addf, [entry for sums in found for entry in sums])
    return mgpu.FragmentedArray.splat(total, ())
