"""Pages of latent attention: one vector of each token, of which all heads' keys and values are
projections, and a key of the layer's indexer, if it has one."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache.layer_state import CommittedPath, Geometry, PagedState, zeros_like_shapes
from jaxspec.cache.paged import moved_slots
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import array, pytree
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.selection import Kernels


@pytree
class PagedLatent(PagedState):
    """What one layer keeps: [P, 1, K, D], as pages of one KV head. All devices of a model have the
    same. ``index_keys``: the indexer's keys, likewise; None: the layer has no indexer."""

    pages: Array = array("pages", "group", "slot", "head_dim")
    index_keys: Array | None = array("pages", "group", "slot", "head_dim", default=None)

    @classmethod
    def create(
        cls,
        geometry: Geometry,
        dtype: jnp.dtype,
        layout: Layout,
        width: int,
        index_width: int = 0,
    ) -> Self:
        """Empty pages of vectors of ``width`` entries, and of an indexer's keys of ``index_width``;
        0: of none. Raises ValueError for a layout that spreads sequences over devices."""
        if layout.axes("slot"):
            raise ValueError("latent attention keeps whole sequences on a device: take sp 1")

        def empty(width: int) -> Any:
            shape = (geometry.num_pages, 1, geometry.page_size, width)
            return jax.ShapeDtypeStruct(shape, dtype)

        shapes = cls(pages=empty(width), index_keys=empty(index_width) if index_width else None)
        return zeros_like_shapes(shapes, geometry, layout)

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Move the vectors of accepted nodes down to the sequence's next slots."""
        if committed.is_chain:
            return states
        slots = moved_slots(committed, states[0].pages.shape[2])

        def moved(pages: list[Array]) -> Iterator[Array]:
            how = kernels.over_pages("kv_compact", pages[0])
            return iter(kv_compact(pages, *slots, how))

        vectors = moved([state.pages for state in states])
        states = [state.replace(pages=next(vectors)) for state in states]
        keys = [state.index_keys for state in states if state.index_keys is not None]
        if not keys:
            return states
        new = moved(keys)
        return [
            state if state.index_keys is None else state.replace(index_keys=next(new))
            for state in states
        ]
