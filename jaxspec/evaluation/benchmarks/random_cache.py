"""Caches full of random numbers, in place of those that reading a long prompt would leave."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache.layer_state import PagedState
from jaxspec.decoding.state import Pool
from jaxspec.models.nodes import map_nodes
from pallas_kernels.float8 import BYTES

FINITE = 0xBF  # bits of a byte that leave one of the exponent out: no such byte is NaN


def with_random_pages(pool: Pool) -> Pool:
    """The pool with normal numbers in all pages of target and drafter; what layers keep of rows
    stays as it is. Zeros would do as well for the results, but a device that multiplies zeros
    draws less power, and so may run faster. The pool's old pages are gone."""
    return map_nodes(pool, lambda state: jax.tree.map(_random_like, state), PagedState)


def _random_like(pages: Array) -> Array:
    made = _maker(pages.shape, pages.dtype, pages.sharding)()
    pages.delete()
    return made


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """A compiled function that makes the numbers where the pages lie."""
    key = jax.random.key(0, impl="rbg")

    def made() -> Array:
        if dtype == BYTES:
            return jax.random.bits(key, shape, BYTES) & jnp.asarray(FINITE, BYTES)
        return jax.random.normal(key, shape, dtype)

    return jax.jit(made, out_shardings=sharding)
