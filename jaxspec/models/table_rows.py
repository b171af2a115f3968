"""Rows of tables that are split over devices."""

import jax.numpy as jnp
from jax import Array

from jaxspec.parallel import Axes
from jaxspec.parallel.collectives import shard_offset


def local_rows(table: Array, rows: Array, axes: Axes) -> Array:
    """Rows [...] that this device has of a table [V, C] that is split over mesh axes, zeros for the
    others: [..., C]."""
    if not axes:
        return table[rows]
    size = table.shape[0]
    local = rows - shard_offset(size, axes)
    here = (local >= 0) & (local < size)
    found = table[jnp.clip(local, 0, size - 1)]
    return jnp.where(here[..., None], found, 0)
