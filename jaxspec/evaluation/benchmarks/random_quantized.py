"""Random quantized weights, made on the device: never larger than they are stored."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear

SPREADS = {"int4": 4.6, "int8": 74.0, "float8_e4m3fn": 74.0}  # standard deviations of the integers
QUANTIZED = (GroupedLinear, Float8Linear)


def random_quantized(shapes: Any, places: Any, key: Array, spread: float) -> Any:
    """A GroupedLinear or a Float8Linear of ShapeDtypeStructs, filled.

    Args:
      places: the same with the sharding or format of each array.
      spread: standard deviation of the weights.
    """
    step = spread / SPREADS[shapes.values.dtype.name]
    keys = jax.random.split(key, 3)
    values, scale = shapes.values, shapes.scale
    made = shapes.replace(
        values=_integers(values.shape, values.dtype, places.values)(keys[0]),
        scale=_scales(scale.shape, scale.dtype, places.scale)(keys[1], step),
    )
    if getattr(shapes, "zero", None) is None:
        return made
    zero = shapes.zero
    return made.replace(zero=_zeros(zero.shape, zero.dtype, places.zero)(keys[2]))


@functools.cache
def _integers(shape: tuple[int, ...], dtype: jnp.dtype, place: Any) -> Any:
    """From a key to integers of 4 or 8 bits; as floats of 8 bits they are rounded."""
    *lead, size = shape

    def generate(key: Array) -> Array:
        words = jax.random.bits(key, (*lead, -(-size // 4)), jnp.uint32)
        integers = jax.lax.bitcast_convert_type(words, jnp.int8)  # [..., size / 4, 4]
        integers = integers.reshape(*lead, -1)[..., :size]
        return (integers >> 4 if dtype == jnp.int4 else integers).astype(dtype)

    return jax.jit(generate, out_shardings=place)


@functools.cache
def _scales(shape: tuple[int, ...], dtype: jnp.dtype, place: Any) -> Any:
    def generate(key: Array, step: float) -> Array:
        return (step * jax.random.uniform(key, shape, minval=0.8, maxval=1.2)).astype(dtype)

    return jax.jit(generate, out_shardings=place)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, place: Any) -> Any:
    def generate(key: Array) -> Array:
        return jax.random.randint(key, shape, -1, 2, jnp.int8).astype(dtype)

    return jax.jit(generate, out_shardings=place)
