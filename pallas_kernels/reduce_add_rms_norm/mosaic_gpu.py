"""Sum over devices, residual addition and norm on Hopper GPUs: one warpgroup per row.

Devices exchange their rows by plain stores to each other's memory, as exchange.py describes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import kernel_axes
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.products import total_f32
from pallas_kernels.reduce_add_rms_norm.exchange import (
    PACKET_ENTRIES,
    WIDTH_STEP,
    WORD,
    Tuning,
)
from pallas_kernels.reduce_add_rms_norm.packets import Area, add, i64, multiply, pinned


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "axis", "tuning"))
def reduce_add_rms_norm_mosaic(
    x: Array,  # [..., H]
    partials: Array,  # [S, ..., H]
    weight: Array,  # [H]
    exchange: Array,  # [1, words]
    eps: float,
    axis: str,
    tuning: Tuning | None = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.reduce_add_rms_norm.reduce_add_rms_norm; only for arguments that
    ``misfit`` accepts. The exchange must have been made for ``tuning``."""
    num_splits, hidden = len(partials), x.shape[-1]
    rows, devices = x.size // hidden, lax.axis_size(axis)
    tuning = tuning or Tuning.of(devices, hidden)
    one_shot = rows <= tuning.one_shot_rows
    blocks = min(rows, tuning.one_shot_blocks if one_shot else tuning.two_shot_blocks)
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=PACKET_ENTRIES)
    first, stride = mesh_group(axis)
    summed = sum_over_devices(tuning, one_shot, devices, hidden, stride)

    @fixed_name()
    def reduce_add_rms_norm_kernel(
        x_ref, partials_ref, weight_ref, exchange_ref, total_ref, normed_ref
    ):
        block = kernel_axes.index("block")

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout)

        def add_and_norm(row: Array) -> None:
            residual = load(x_ref.at[row])
            added = [load(partials_ref.at[split, row]) for split in range(num_splits)]
            scales = load(weight_ref)
            local_sum = total_f32(added).astype(x.dtype)  # rounded as an unsplit product is
            y = summed(local_sum, exchange_ref, block, lax.axis_index(axis), first())
            total = (residual.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
            total_ref[row] = total
            wide = total.astype(jnp.float32)  # from the rounded sum, as the reference does
            scale = lax.rsqrt(jnp.sum(wide * wide) / hidden + eps)
            normed_ref[row] = (wide * scale).astype(x.dtype) * scales

        if rows == blocks:
            add_and_norm(block)
            return

        def step(index: Array, _: None) -> None:
            row = block + index * blocks
            pl.when(row < rows)(lambda: add_and_norm(row))

        lax.fori_loop(0, pl.cdiv(rows, blocks), step, None)

    flat = jax.ShapeDtypeStruct((rows, hidden), x.dtype)
    kernel = plgpu.kernel(
        reduce_add_rms_norm_kernel,
        out_type=(flat, flat),
        grid=(blocks,),
        grid_names=kernel_axes.names("block"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
        ),
    )
    total, normed = kernel(
        x.reshape(rows, hidden), partials.reshape(num_splits, -1, hidden), weight, exchange
    )
    return total.reshape(x.shape), normed.reshape(x.shape)


def mesh_group(axis: str) -> tuple[Callable[[], Array], int]:
    """Logical ids of the devices along the axis: a function that returns the first one within a
    kernel, and the distance to the next. Ids are row-major in the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    names, sizes = mesh.axis_names, mesh.axis_sizes
    strides = {name: math.prod(sizes[at + 1 :]) for at, name in enumerate(names)}
    others = [name for name, size in zip(names, sizes, strict=True) if size > 1 and name != axis]

    def first() -> Array:
        return sum((lax.axis_index(name) * strides[name] for name in others), jnp.int32(0))

    return first, strides[axis]


def sum_over_devices(
    tuning: Tuning, one_shot: bool, devices: int, hidden: int, stride: int
) -> Callable[..., Array]:
    """A function that exchanges a row and returns the sum over devices, within a kernel.

    Its arguments are this device's row [H], the exchange, the index of the block, the index of the
    device along the axis, and the logical id of the first device; ``stride`` is from one id to the
    next.
    """
    columns = hidden // WIDTH_STEP  # packets of a row that a thread has
    one_shot_words = tuning.one_shot_words(devices, hidden)
    words = one_shot_words if one_shot else tuning.two_shot_words(hidden)
    before = 0 if one_shot else tuning.one_shot_blocks * one_shot_words
    places = devices * columns if one_shot else 2 * columns  # packets of a thread in an exchange
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=PACKET_ENTRIES)

    def emit(ctx: Any, row: Any, exchange: Any, *scalars: Any) -> Any:
        block, me, first = (scalar.registers.item() for scalar in scalars)
        peers = [add(first, index * stride) for index in range(devices)]
        start = add(multiply(block, words * WORD), before * WORD)
        area = Area.open(ctx, exchange, peers, start, places)
        values = [utils.bitcast(entry, i64()) for entry in row.registers.flat]
        run = one_shot_sums if one_shot else two_shot_sums
        sums = run(area, values, me, devices, tuning.packets)
        area.close()
        registers = np.array([utils.bitcast(entry, entries_type()) for entry in sums], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(row.registers.shape), _layout=row.layout, _is_signed=None
        )

    scalar = plgpu.Layout.WG_SPLAT(())
    inlined: Any = plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), scalar, scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct((hidden,), jnp.dtype(jnp.bfloat16), layout=layout),
    )
    return inlined(emit)


def one_shot_sums(
    area: Area, values: Sequence[Any], me: Any, devices: int, packets: int
) -> list[Any]:
    """Send all values to all devices, this one too; the sums of what all have sent."""
    columns = len(values)
    for peer in range(devices):
        area.send(peer, multiply(me, columns), values)
    sums, most = [], max(1, packets // devices)
    for begin in range(0, columns, most):
        chosen = range(begin, min(begin + most, columns))
        places = [device * columns + column for device in range(devices) for column in chosen]
        received = area.receive(places)
        sums += [total(received[at :: len(chosen)]) for at in range(len(chosen))]
    return sums


def two_shot_sums(
    area: Area, values: Sequence[Any], me: Any, devices: int, packets: int
) -> list[Any]:
    """Send each device its part of the values, add up the parts received, send the sums to all."""
    columns, part = len(values), len(values) // devices
    mine = multiply(me, part)
    for peer in range(devices):
        area.send(peer, mine, values[peer * part : (peer + 1) * part])
    received = in_batches(area, range(columns), packets)
    sums = [total(received[at::part]) for at in range(part)]
    for peer in range(devices):
        area.send(peer, add(mine, columns), sums)
    return in_batches(area, range(columns, 2 * columns), packets)


def in_batches(area: Area, places: range, packets: int) -> list[Any]:
    """Receive so many packets at a time."""
    starts = range(0, len(places), packets)
    return [value for at in starts for value in area.receive(places[at : at + packets])]


def total(values: Sequence[Any]) -> Any:
    """The sum of 4 bfloat16 each, in float32 and in order, rounded once."""
    wide = ir.VectorType.get((PACKET_ENTRIES,), ir.F32Type.get())
    terms = [arith.extf(wide, utils.bitcast(value, entries_type())) for value in values]
    rounded = arith.truncf(entries_type(), functools.reduce(arith.addf, terms))
    return pinned(utils.bitcast(rounded, i64()))


def entries_type() -> Any:
    return ir.VectorType.get((PACKET_ENTRIES,), ir.BF16Type.get())
