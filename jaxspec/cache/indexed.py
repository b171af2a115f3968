"""Pages of attention with grouped KV heads to chosen positions: keys, values, and what is kept of
each token to choose by, for an indexer or for index heads."""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache.layer_state import CommittedPath, Geometry, zeros_like_shapes
from jaxspec.cache.paged import KVScales, PagedKV, move, moved_slots
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import array, pytree
from pallas_kernels.float8 import BYTES
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.selection import Kernels


@pytree
class PagedIndexedKV(PagedKV):
    """Keys and values as of PagedKV, and ``index_keys`` [P, 1, K, D], as pages of one KV head. All
    devices of a model have the same index keys."""

    index_keys: Array = array("pages", "group", "slot", "head_dim")

    @classmethod
    def empty(
        cls,
        geometry: Geometry,
        sizes: tuple[int, int, int],
        dtype: jnp.dtype,
        layout: Layout,
        scales: KVScales | None = None,
    ) -> Self:
        """Empty pages; ``sizes``: KV heads, their entries, those of an index key. Keys and values
        are bytes if there are scales.

        Raises ValueError for a layout that spreads sequences over devices.
        """
        if layout.axes("slot"):
            raise ValueError(
                "attention to chosen positions keeps whole sequences on a device: take sp 1"
            )
        kv_heads, head_dim, index_dim = sizes

        def pages(heads: int, width: int, dtype: jnp.dtype) -> Any:
            size = geometry.num_pages, heads, geometry.page_size, width
            return jax.ShapeDtypeStruct(size, dtype)

        kv = pages(kv_heads, head_dim, dtype if scales is None else BYTES)
        shapes = cls(k=kv, v=kv, index_keys=pages(1, index_dim, dtype))
        return zeros_like_shapes(shapes, geometry, layout)

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Move what is kept of accepted nodes down to the sequence's next slots."""
        if committed.is_chain:
            return states
        slots = moved_slots(committed, states[0].page_size)
        pages = [state.index_keys for state in states]
        moved = kv_compact(pages, *slots, kernels.over_pages("kv_compact", pages[0]))
        states = move(states, *slots, kernels)
        return [state.replace(index_keys=x) for state, x in zip(states, moved, strict=True)]
