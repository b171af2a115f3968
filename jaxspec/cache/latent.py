"""Pages of latent attention: one vector of each token, of which all heads' keys and values are
projections."""

from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache.layer_state import CommittedPath, Geometry
from jaxspec.cache.paged import moved_slots
from jaxspec.parallel import Layout, named_shardings
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.selection import Kernels


@pytree
class PagedLatent(Pytree):
    """What one layer keeps: [P, 1, K, D], as pages of one KV head. All devices of a model have the
    same."""

    pages: Array = array("pages", "group", "slot", "head_dim")

    @classmethod
    def create(cls, geometry: Geometry, width: int, dtype: jnp.dtype, layout: Layout) -> Self:
        """Empty pages. Raises ValueError for a layout that spreads sequences over devices."""
        if layout.axes("slot"):
            raise ValueError("latent attention keeps whole sequences on a device: take sp 1")
        shape = (geometry.num_pages, 1, geometry.page_size, width)
        sharding = None
        if geometry.mesh is not None:
            probe = cls(pages=jnp.zeros(()))
            sharding = named_shardings(geometry.mesh, probe, layout).pages
        return cls(pages=jnp.zeros(shape, dtype, device=sharding))

    @property
    def overwritable(self) -> bool:
        return True

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

    def reset(self, rows: Array) -> Self:
        """Unchanged: a new sequence reads only slots that it has written."""
        return self

    def take(self, pages: Array, rows: Array) -> Self:
        return self.replace(pages=self.pages[pages])

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        return self.replace(pages=self.pages.at[pages].set(saved.pages))
