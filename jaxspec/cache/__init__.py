"""Layer states: the interface that the engine uses, and the paged KV cache."""

from jaxspec.cache.entries import PagedEntries
from jaxspec.cache.indexed import PagedIndexedKV
from jaxspec.cache.latent import PagedLatent
from jaxspec.cache.layer_state import (
    CommittedPath,
    Geometry,
    LayerState,
    LayerStates,
    ModelState,
)
from jaxspec.cache.paged import (
    KVScales,
    PagedKV,
    page_slots,
    sequential_page_table,
)

__all__ = [
    "CommittedPath",
    "Geometry",
    "KVScales",
    "LayerState",
    "LayerStates",
    "ModelState",
    "PagedEntries",
    "PagedIndexedKV",
    "PagedKV",
    "PagedLatent",
    "page_slots",
    "sequential_page_table",
]
