"""The paged KV cache: pages of each layer, and where a sequence's positions lie in them.

A slot is ``page * page_size + offset``. Page 0 is the null page: padding is written there and
nothing reads it. Slots are just positions in the sequence's own pages, so tree nodes live right
past the committed context and acceptance moves a few rows down.
"""

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxspec.pytree import array, pytree
from jaxspec.sharding import DATA_PARALLEL, TENSOR_PARALLEL, named_shardings
from pallas_kernels.kv_compact import kv_compact


@pytree
class LayerCache:
    """Keys and values of one layer, [P, G, K, D] each: a KV head's page is one contiguous tile."""

    k: Array = array("pages", "kv_heads", "slot", "head_dim")
    v: Array = array("pages", "kv_heads", "slot", "head_dim")


def pages_for(num_slots: int, page_size: int) -> int:
    """Pages that hold ``num_slots`` slots."""
    return -(-num_slots // page_size)


def init_layers(
    num_layers: int,
    num_pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    *,
    sharded_heads: bool = True,
) -> tuple[LayerCache, ...]:
    """Empty caches of ``num_layers`` layers, created in place on ``mesh`` when one is given.

    ``num_pages`` counts the null page(s) too. With ``sharded_heads`` False every device of the
    model axis holds all KV heads.
    """
    shape = (num_pages, kv_heads, page_size, head_dim)
    sharding = None
    if mesh is not None:
        rules = TENSOR_PARALLEL if sharded_heads else DATA_PARALLEL
        probe = LayerCache(k=jnp.zeros(()), v=jnp.zeros(()))
        sharding = named_shardings(mesh, probe, rules).k

    def zeros() -> Array:
        return jnp.zeros(shape, dtype, device=sharding)

    return tuple(LayerCache(k=zeros(), v=zeros()) for _ in range(num_layers))


def sequential_page_table(batch: int, pages_per_sequence: int, data_parallel: int = 1) -> Array:
    """A table that gives each sequence its own run of pages: int32 [B, M].

    Under data parallelism each shard of the batch counts pages of its own pool, from its own null
    page on.
    """
    row = jnp.arange(batch, dtype=jnp.int32) % (batch // data_parallel)
    page = jnp.arange(pages_per_sequence, dtype=jnp.int32)
    return 1 + row[:, None] * pages_per_sequence + page


def page_slots(page_table: Array, positions: Array, valid: Array, page_size: int) -> Array:
    """Slots of sequence positions: table [B, M], positions and valid [B, T] -> int32 [B, T].

    Positions that are not valid, or past the table, map to the null page.
    """
    index = positions // page_size
    fits = valid & (positions >= 0) & (index < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.where(fits, index, 0), axis=1)
    return jnp.where(fits, page * page_size + positions % page_size, 0)


def compact(
    layers: tuple[LayerCache, ...], source: Array, destination: Array
) -> tuple[LayerCache, ...]:
    """Move the rows at slots ``source`` [B, A] to slots ``destination`` [B, A], in every layer.

    All rows are read before any is written, so the two may overlap.
    """
    pages = [one for layer in layers for one in (layer.k, layer.v)]
    moved = kv_compact(pages, source, destination)
    return tuple(LayerCache(k=k, v=v) for k, v in zip(moved[::2], moved[1::2], strict=True))
