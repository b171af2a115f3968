"""Scales of NVFP4 as the kernel takes them: e4m3 in a file, e5m3 in memory.

A number of e4m3 is one of e5m3 that is neither 0 nor subnormal, if it is above 0. So a thread makes
a scale of its byte by moving and adding (see widening.py). Scales below 0 and scales that are 0 are
brought into the numbers of their groups, which is exact, too.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.four_bits import E5M3_SHIFT

ONE = 0x78  # in e5m3
SIGNS = 0x88  # of the two numbers in a byte


@jax.jit
def with_e5m3_scales(pairs: Array, scale: Array) -> tuple[Array, Array]:
    """Numbers e2m1 uint8 [..., in / 2] and scales uint8 [..., groups] of the same weights.

    ``pairs``: two numbers in a byte, in input order. ``scale``: e4m3 [..., groups], not NaN.
    """
    halves = lax.bitcast_convert_type(scale.astype(jnp.float16), jnp.uint16)
    bits = (halves >> E5M3_SHIFT & 0xFF).astype(jnp.uint8)
    is_zero, is_negative = bits == 0, halves >> 15 == 1
    groups = pairs.reshape(*scale.shape, -1)
    signed = groups ^ jnp.where(is_negative, SIGNS, 0).astype(jnp.uint8)[..., None]
    numbers = jnp.where(is_zero[..., None], 0, signed)
    return numbers.reshape(pairs.shape), jnp.where(is_zero, ONE, bits).astype(jnp.uint8)
