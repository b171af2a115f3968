"""Bytes that arrays take on a device, and bytes as text."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def local_bytes(tree: Any) -> int:
    """Bytes of the tree's arrays on one device."""
    return sum(
        -(-math.prod(leaf.sharding.shard_shape(leaf.shape)) * _bits(leaf.dtype) // 8)
        for leaf in jax.tree.leaves(tree)
    )


def _bits(dtype: jnp.dtype) -> int:
    """Bits of an element on a device: two integers of 4 bits share a byte."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return jnp.iinfo(dtype).bits if is_integer else 8 * jnp.dtype(dtype).itemsize


def megabytes(size: float) -> str:
    """Bytes as ``1,234.5 MB``, of 10^6 bytes."""
    return f"{size / 1e6:,.1f} MB"


def gigabytes(size: float) -> str:
    """Bytes as ``1,234.56 GB``, of 10^9 bytes."""
    return f"{size / 1e9:,.2f} GB"
