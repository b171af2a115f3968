"""Pages whose slots are spread over the devices of a sequence, inside shard_map.

A page of K slots has K / n on each of n devices, in order. All devices have the same page tables,
and page 0 is the null page of each. So who allocates pages need not know of it, and every sequence
is spread evenly.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.parallel import Axes
from jaxspec.parallel.collectives import all_reduce, shard_offset
from pallas_kernels.rope_kv_write.reference import read_rows, write_rows


def local_slots(slots: Array, local_size: int, axes: Axes) -> Array:
    """Slots ``page * K + offset`` in this device's part of the pages, of ``local_size`` slots each.

    Slots of other devices map to slot 0, of the null page.
    """
    page_size = local_size * lax.axis_size(axes)
    offset = slots % page_size - shard_offset(local_size, axes)
    here = (offset >= 0) & (offset < local_size)
    return jnp.where(here, slots // page_size * local_size + offset, 0)


def move_rows(pages: Sequence[Array], source: Array, destination: Array, axes: Axes) -> list[Array]:
    """Move the rows at slots ``source`` [B, A] to ``destination`` [B, A], in each of many caches
    [P, G, K / n, D] of one dtype.

    Each device gets all of them, because they may go to another one, and writes those of its slots.
    """
    sizes = [cache.shape[2] for cache in pages]
    rows = [
        _where_local(read_rows(cache, local_slots(source, size, axes)), source, size, axes)
        for cache, size in zip(pages, sizes, strict=True)
    ]
    shapes = [part.shape for part in rows]
    flat = [part.reshape(*source.shape, -1) for part in rows]
    moved = all_reduce(jnp.concatenate(flat, axis=-1), axes)  # in one collective
    ends = [sum(part.shape[-1] for part in flat[: i + 1]) for i in range(len(flat) - 1)]
    parts = jnp.split(moved, ends, axis=-1)
    return [
        write_rows(cache, part.reshape(shape), local_slots(destination, size, axes))
        for cache, part, shape, size in zip(pages, parts, shapes, sizes, strict=True)
    ]


def _where_local(rows: Array, slots: Array, local_size: int, axes: Axes) -> Array:
    """Rows [B, A, G, D] of this device's slots, zeros for those of others."""
    part = slots % (local_size * lax.axis_size(axes)) // local_size
    return jnp.where((part == lax.axis_index(axes))[..., None, None], rows, 0)
