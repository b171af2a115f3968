"""The residual stream behind the MLP and its norm, of a row, on Hopper GPUs.

The multiplying warpgroups of a thread block share the row: so each thread has few entries, and all
partial sums are on their way at the same time.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import kernel_axes
from pallas_kernels.o_gate_up_down.outputs import as_bfloat16
from pallas_kernels.o_gate_up_down.plan import WARPS
from pallas_kernels.o_gate_up_down.rows import THREADS, load_sums, store_sum
from pallas_kernels.products import total_f32
from pallas_kernels.round_tokens.reference import rounded_by, scale_of
from pallas_kernels.round_tokens.row_parts import RowParts
from pallas_kernels.warp_products import shared_address
from pallas_kernels.words import Word

_SUMS_BYTES = 4 * WARPS


def norm_row(
    parts: RowParts,
    row: Array,
    weight: Array,
    sums: Any,
    refs: dict[str, Any],
    *,
    eps: float,
    interpret: bool,
) -> None:
    """Store a row of the stream and its norm. All warpgroups that share it call this.

    Args:
      weight: the calling warpgroup's part of the norm's weights.
      sums: float32 [2, warpgroups, WARPS] in shared memory; each call needs its own.
      refs: "total", the stream before the MLP, and "partials", what is added to it; the results
        "stream" and "normed", or "rounded" and "rounded_scale" in place of the norm, as
        round_tokens makes them; "row_summed", a barrier of the warpgroups.
    """
    stream, part = refs["stream"], parts.slice_of_part()
    combine = functools.partial(_combined, parts, refs["row_summed"], interpret)
    before = parts.load(refs["total"].at[row]).astype(jnp.float32)
    splits = range(refs["partials"].shape[0])
    terms = [parts.load(refs["partials"].at[split, row]) for split in splits]
    added = _narrowed(total_f32(terms), interpret)  # rounded as an unsplit product is
    total = _narrowed(before + added, interpret)
    stream[row, part] = total.astype(stream.dtype)
    squares = combine(total * total, sums.at[0], jnp.sum, arith.addf)
    normed = _narrowed(total * lax.rsqrt(squares / parts.width + eps), interpret)
    normed = _narrowed(normed * weight.astype(jnp.float32), interpret)
    if "normed" in refs:
        refs["normed"][row, part] = normed.astype(stream.dtype)
        return
    scale = scale_of(combine(jnp.abs(normed), sums.at[1], jnp.max, arith.maximumf))
    refs["rounded"][row, part] = rounded_by(normed, scale)

    @pl.when(kernel_axes.index("warpgroup") == 0)
    def _store_scale():
        refs["rounded_scale"][0, row] = scale


def _narrowed(x: Array, interpret: bool) -> Array:
    """Float32 numbers rounded to those of bfloat16, which XLA would leave out."""
    return as_bfloat16(x) if interpret else x.astype(jnp.bfloat16).astype(jnp.float32)


def _combined(
    parts: RowParts, barrier: Any, interpret: bool, part: Array, sums: Any, reduce: Any, add: Any
) -> Array:
    """The sum of a row, or what ``add`` makes of its entries, of the parts of all warpgroups."""
    warpgroup = kernel_axes.index("warpgroup")
    if interpret:  # the interpreter does not support inlined MLIR
        sums[warpgroup, 0] = reduce(part)
    else:
        inlined: Any = plgpu.inline_mgpu(arg_types=(parts.layout, plgpu.RefType()))
        inlined(functools.partial(_emit_part, add=add))(part, sums.at[warpgroup])
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    if interpret:
        return reduce(sums[...][:, 0])
    scalar: Any = plgpu.ShapeDtypeStruct((), jnp.dtype("float32"), layout=plgpu.Layout.WG_SPLAT(()))
    emit = functools.partial(_emit_total, warpgroups=parts.warpgroups, add=add)
    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=scalar)
    return inlined(emit)(sums)


def _emit_part(_: Any, part: Any, sums: Any, *, add: Any) -> None:
    """Store what each warp of the warpgroup makes of its entries."""
    entries = functools.reduce(add, part.registers.flat)
    [count] = ir.VectorType(entries.type).shape
    terms = [vector.extract(entries, [], [at]) for at in range(count)]
    thread = Word(mgpu.thread_idx()) % THREADS
    store_sum(functools.reduce(add, terms), shared_address(sums), thread, add)


def _emit_total(_: Any, sums: Any, *, warpgroups: int, add: Any) -> Any:
    begin = shared_address(sums)
    found = [load_sums(begin + _SUMS_BYTES * at) for at in range(warpgroups)]
    total = functools.reduce(add, [entry for of_warps in found for entry in of_warps])
    return mgpu.FragmentedArray.splat(total, ())
