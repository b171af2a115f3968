"""Compaction: moves a few rows in the KV caches of many layers, in one launch."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import BYTES
from pallas_kernels.kv_compact.reference import kv_compact_reference
from pallas_kernels.selection import Implementation, kernel_module

HEAD_SIZES = (128, 256)  # the copy engine takes at most 256 entries of a dimension at once
MAX_ROWS = 32  # most rows of a sequence; all are held in shared memory


def kv_compact(
    pages: Sequence[Array],
    source: Array,
    destination: Array,
    implementation: Implementation = "reference",
) -> tuple[Array, ...]:
    """Move the rows at slots ``source`` to slots ``destination``, in each of many caches.

    All rows of a sequence are read before any is written, so source and destination may overlap.

    Args:
      pages: caches [P, G, K, D] of one shape and dtype, written in place where the caller donates
        them.
      source, destination: int32 [B, A], ``page * K + offset``. Destinations must be distinct,
        except for slots of the null page 0. No sequence may read what another one writes.
      implementation: see selection.Implementation; the Hopper kernel takes bfloat16 or bytes, D
        128 or 256, at most 32 rows.

    Returns the caches, in the same order.
    """
    problem = misfit(pages, source)
    mosaic = kernel_module("kv_compact", implementation, problem)
    if mosaic is None:
        return kv_compact_reference(pages, source, destination)
    return mosaic.kv_compact_mosaic(tuple(pages), source, destination)


def misfit(pages: Sequence[Array], source: Array) -> str | None:
    """Why the kernel cannot take these caches, None if it can."""
    kinds = {(array.shape, array.dtype) for array in pages}
    if len(kinds) != 1 or pages[0].dtype not in (jnp.bfloat16, BYTES):
        return f"{len(pages)} caches that are not bfloat16 of one shape, nor bytes of one shape"
    if pages[0].shape[-1] not in HEAD_SIZES:
        return f"heads of {pages[0].shape[-1]}: they must be 128 or 256 wide"
    if source.shape[1] > MAX_ROWS:
        return f"{source.shape[1]} rows per sequence: at most {MAX_ROWS}"
    return None
