"""Work on the positions of sequences a block at a time, where all at once would not fit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def map_blocks(function: Callable[[Any], Any], values: Any, size: int) -> Any:
    """``function`` of blocks [B, size, ...] of the values [B, T, ...], put together: [B, T, ...].

    The last block is padded with zeros. ``function`` gives arrays [B, size, ...].
    """
    batch, length = jax.tree.leaves(values)[0].shape[:2]

    def in_blocks(x: Array) -> Array:  # [B, T, ...] -> [T / size, B, size, ...]
        padded = jnp.pad(x, ((0, 0), (0, -length % size), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    def whole(x: Array) -> Array:  # the inverse
        return jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :length]

    return jax.tree.map(whole, lax.map(function, jax.tree.map(in_blocks, values)))
