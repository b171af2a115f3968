"""Pages of attention to a window and to entries: of each token a vector, and what entries are made
of, which has the entry itself where a span of tokens ends."""

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
class PagedEntries(PagedState):
    """What one layer keeps: [P, 1, K, D] each, as pages of one KV head. All devices of a model have
    the same.

    Attributes:
      pages: vectors of tokens.
      spans: what entries are made of (see pallas_kernels/latent_attention/spans.py); None: there
        are no entries.
      index_spans: the same of the indexer's keys; None: the layer has no indexer.
    """

    pages: Array = array("pages", "group", "slot", "head_dim")
    spans: Array | None = array("pages", "group", "slot", "head_dim", default=None)
    index_spans: Array | None = array("pages", "group", "slot", "head_dim", default=None)

    @classmethod
    def create(
        cls, geometry: Geometry, dtype: jnp.dtype, layout: Layout, widths: tuple[int, int, int]
    ) -> Self:
        """Empty pages of so many numbers each, in the order of the attributes; 0: of none.

        Raises ValueError for a layout that spreads sequences over devices.
        """
        if layout.axes("slot"):
            raise ValueError("attention to entries keeps whole sequences on a device: take sp 1")

        def empty(width: int) -> Any:
            shape = (geometry.num_pages, 1, geometry.page_size, width)
            return jax.ShapeDtypeStruct(shape, dtype) if width else None

        pages, spans, index_spans = map(empty, widths)
        shapes = cls(pages=pages, spans=spans, index_spans=index_spans)
        return zeros_like_shapes(shapes, geometry, layout)

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Move what is kept of accepted nodes down to the sequence's next slots."""
        if committed.is_chain:
            return states
        slots = moved_slots(committed, states[0].pages.shape[2])
        new = states
        for name in ("pages", "spans", "index_spans"):
            pages = [getattr(state, name) for state in states]
            if pages[0] is None:  # of states of one kind all have it, or none
                continue
            moved = kv_compact(pages, *slots, kernels.over_pages("kv_compact", pages[0]))
            new = [state.replace(**{name: x}) for state, x in zip(new, moved, strict=True)]
        return new
