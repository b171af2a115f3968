"""Paged KV memory as a pytree."""

from jaxspec.cache.paged import (
    LayerCache,
    compact,
    init_layers,
    page_slots,
    pages_for,
    sequential_page_table,
)

__all__ = [
    "LayerCache",
    "compact",
    "init_layers",
    "page_slots",
    "pages_for",
    "sequential_page_table",
]
