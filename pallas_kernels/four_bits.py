"""Numbers of 4 bits, two in a byte, and the scales that groups of them share.

The low half of a byte is the even input's, the high half the odd input's. Products take them
widened. All numbers and all scales are exact in float32, but for those below the least normal
number: units that flush these to 0 do so here, too.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

# int4: from -8 to 7, stored plus 8. e2m1: floats of a sign, two bits of exponent, one of mantissa.
Code = Literal["int4", "e2m1"]
# Of scales that are bytes. e8m0: exponents, 2^(byte - 127). e5m3: the 8 bits of float16 behind its
# sign, but for subnormal ones and infinities.
ScaleCode = Literal["e8m0", "e5m3"]
MANTISSA_BITS = 23  # of float32
E5M3_SHIFT = 7  # to the bits of float16


def widened_pairs(pairs: Array, code: Code) -> Array:
    """The numbers float32 [..., 2 n] of bytes uint8 [..., n]."""
    number = _of_int4 if code == "int4" else _of_e2m1
    wide = pairs.astype(jnp.int32)
    halves = jnp.stack([number(wide & 15), number(wide >> 4)], axis=-1)
    return halves.reshape(*pairs.shape[:-1], -1)


def _of_int4(fields: Array) -> Array:
    """Integers of int32 fields from 0 to 15."""
    return (fields - 8).astype(jnp.float32)


def _of_e2m1(fields: Array) -> Array:
    """Floats of int32 fields from 0 to 15: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then these negated."""
    mantissa, exponent = fields & 1, (fields >> 1) & 3
    normal = (2 + mantissa) << jnp.maximum(exponent - 1, 0)
    magnitude = jnp.where(exponent == 0, mantissa, normal).astype(jnp.float32) * 0.5
    return jnp.where(fields >= 8, -magnitude, magnitude)


def widened_scales(scales: Array, code: ScaleCode = "e8m0") -> Array:
    """Scales in float32: bytes (uint8) are of ``code``; floats are numbers."""
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    if code == "e5m3":
        halves = scales.astype(jnp.uint16) << E5M3_SHIFT
        return lax.bitcast_convert_type(halves, jnp.float16).astype(jnp.float32)
    bits = scales.astype(jnp.uint32) << MANTISSA_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


def scaled_groups(numbers: Array, scales: Array, zeros: Array | None = None) -> Array:
    """(numbers - zeros) * scales, of numbers [..., in] in groups of inputs that follow each other,
    whose scales and zeros are [..., groups]."""
    by_group = numbers.reshape(*scales.shape, -1)
    if zeros is not None:
        by_group = by_group - zeros[..., None]
    return (by_group * scales[..., None]).reshape(numbers.shape)
