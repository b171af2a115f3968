"""The paged KV cache: the pages of each layer, and the slots of a sequence's positions.

A slot is ``page * page_size + offset``. Page 0 is the null page: padding is written there, and
nothing read from it affects a result. A sequence's positions map to slots of its own pages in
order. Tree nodes are written right after the committed context, and acceptance moves the accepted
rows down.
"""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache.layer_state import CommittedPath, Geometry, PagedState, zeros_like_shapes
from jaxspec.cache.spread import move_rows
from jaxspec.parallel import Axes, Layout
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.float8 import BYTES
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.selection import Kernels


@pytree
class KVScales(Pytree):
    """What the numbers in 8-bit pages of one layer are multiplied by: float32 [G], above 0.

    They belong to the weights. They never follow what a cache holds: so what is stored of a token
    is the same wherever and whenever it is written. See pallas_kernels/float8.py.
    """

    k: Array = array("kv_heads")
    v: Array = array("kv_heads")


@pytree
class PagedKV(PagedState):
    """Keys and values of one layer, [P, G, K, D] each: the page of a KV head is contiguous.

    In the model's dtype, or as bytes of 8-bit numbers that the layer's KVScales belong to.

    This is the LayerState of attention. ``spread``: mesh axes that the slots of every page are
    spread over (see cache/spread.py).
    """

    k: Array = array("pages", "kv_heads", "slot", "head_dim")
    v: Array = array("pages", "kv_heads", "slot", "head_dim")
    spread: Axes = static(default=())

    @classmethod
    def create(
        cls,
        geometry: Geometry,
        kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
        layout: Layout,
        scales: KVScales | None = None,
    ) -> Self:
        """Empty pages of ``dtype``, or of bytes if there are scales."""
        dtype = dtype if scales is None else BYTES
        shape = (geometry.num_pages, kv_heads, geometry.page_size, head_dim)
        pages: Any = jax.ShapeDtypeStruct(shape, dtype)
        shapes = cls(k=pages, v=pages, spread=layout.axes("slot"))
        return zeros_like_shapes(shapes, geometry, layout)

    @property
    def page_size(self) -> int:
        """Slots of a page, those of other devices included."""
        return self.k.shape[2] * (lax.axis_size(self.spread) if self.spread else 1)

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Move the keys and values of accepted nodes down to the sequence's next slots."""
        if committed.is_chain:
            return states
        return move(states, *moved_slots(committed, states[0].page_size), kernels)


def moved_slots(committed: CommittedPath, page_size: int) -> tuple[Array, Array]:
    """Slots [B, A] of accepted nodes, and those that they are moved to: the null page's for nodes
    that are there already."""
    path = committed.path
    depth = jnp.arange(path.shape[1])
    moved = (depth < committed.counts[:, None]) & (path != depth)
    context = committed.context_lens[:, None]
    source, destination = (
        page_slots(committed.page_table, context + offset, moved, page_size)
        for offset in (path, jnp.broadcast_to(depth, path.shape))
    )
    return source, destination


def move[T: PagedKV](
    states: Sequence[T], source: Array, destination: Array, kernels: Kernels
) -> Sequence[T]:
    """Move the rows at slots ``source`` [B, A] to slots ``destination`` [B, A], in every layer.

    All rows are read before any is written, so source and destination may overlap.
    """
    pages = [cache for state in states for cache in (state.k, state.v)]
    if states[0].spread:
        moved = move_rows(pages, source, destination, states[0].spread)
    else:
        implementation = kernels.over_pages("kv_compact", pages[0])
        moved = kv_compact(pages, source, destination, implementation)
    pairs = zip(states, moved[::2], moved[1::2], strict=True)
    return [state.replace(k=k, v=v) for state, k, v in pairs]


def sequential_page_table(num_rows: int, pages_per_row: int, data_parallel: int = 1) -> Array:
    """A page table that gives each row its own consecutive pages: int32 [R, M].

    Under data parallelism each shard of the rows has its own pool of pages, with its own null page
    0.
    """
    row = jnp.arange(num_rows, dtype=jnp.int32) % (num_rows // data_parallel)
    page = jnp.arange(pages_per_row, dtype=jnp.int32)
    return 1 + row[:, None] * pages_per_row + page


def page_slots(page_table: Array, positions: Array, valid: Array, page_size: int) -> Array:
    """Slots of sequence positions: table [B, M], positions and valid [B, T] -> int32 [B, T].

    Positions that are not valid, or beyond the table, map to the null page.
    """
    index = positions // page_size
    fits = valid & (positions >= 0) & (index < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.where(fits, index, 0), axis=1)
    return jnp.where(fits, page * page_size + positions % page_size, 0)
