"""Pages of latent attention: one vector of each token, of which all heads' keys and values are
projections."""

from collections.abc import Sequence
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
    same."""

    pages: Array = array("pages", "group", "slot", "head_dim")

    @classmethod
    def create(cls, geometry: Geometry, width: int, dtype: jnp.dtype, layout: Layout) -> Self:
        """Empty pages. Raises ValueError for a layout that spreads sequences over devices."""
        if layout.axes("slot"):
            raise ValueError("latent attention keeps whole sequences on a device: take sp 1")
        shape = (geometry.num_pages, 1, geometry.page_size, width)
        pages: Any = jax.ShapeDtypeStruct(shape, dtype)
        return zeros_like_shapes(cls(pages=pages), geometry, layout)

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Move the vectors of accepted nodes down to the sequence's next slots."""
        if committed.is_chain:
            return states
        pages = [state.pages for state in states]
        slots = moved_slots(committed, pages[0].shape[2])
        moved = kv_compact(pages, *slots, kernels.over_pages("kv_compact", pages[0]))
        return [state.replace(pages=pages) for state, pages in zip(states, moved, strict=True)]
