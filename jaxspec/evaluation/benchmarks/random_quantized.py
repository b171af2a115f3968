"""Random quantized weights, made on the device: never larger than they are stored."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.quantized.float4 import Float4Linear
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.models.quantized.packed_experts import PackedExpertLinear
from pallas_kernels.packed_expert_product.scales import ONE
from pallas_kernels.packed_experts import BIAS, Code
from pallas_kernels.packed_order import stored_order

SPREADS = {"int4": 4.6, "int8": 74.0, "float8_e4m3fn": 74.0}  # standard deviations of the integers
QUANTIZED = (GroupedLinear, Float4Linear, Float8Linear, PackedExpertLinear)
# Root mean squares of random numbers in bytes, where those of e4m3 are below 2.
NUMBERS: Mapping[Code, float] = MappingProxyType({"e4m3": 0.6, "e2m1": 2.9, "int4": 4.6})
SMALL_E4M3 = 0xBF  # keeps the bits of a number below 2


def random_quantized(shapes: Any, places: Any, key: Array, spread: float) -> Any:
    """Quantized weights of ShapeDtypeStructs, of a class of QUANTIZED, filled.

    Args:
      places: the same with the sharding or format of each array.
      spread: standard deviation of the weights.
    """
    if isinstance(shapes, PackedExpertLinear):
        return _random_experts(shapes, places, key, spread)
    if isinstance(shapes, Float4Linear):
        return _random_float4(shapes, places, key, spread)
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


def _random_experts(
    shapes: PackedExpertLinear, places: Any, key: Array, spread: float
) -> PackedExpertLinear:
    keys = jax.random.split(key, 5)
    made = shapes.replace(
        values=_bytes(shapes.values.shape, shapes.code, places.values)(keys[0]),
        bias=_bias(shapes, places, keys[2], spread),
    )
    step = spread / NUMBERS[shapes.code]
    scale, factor = _scales_and_factor(shapes, places, (keys[1], keys[3]), step)
    if (zero := shapes.zero) is not None:
        zero = BIAS + _zeros(zero.shape, zero.dtype, places.zero)(keys[4])
    return made.replace(scale=scale, zero=zero, factor=factor)


def _random_float4(shapes: Float4Linear, places: Any, key: Array, spread: float) -> Float4Linear:
    keys = jax.random.split(key, 4)
    values = _bytes(shapes.values.shape, "e2m1", places.values)(keys[0])
    step = spread / NUMBERS["e2m1"]
    scale, factor = _scales_and_factor(shapes, places, (keys[1], keys[2]), step)
    bias = _bias(shapes, places, keys[3], spread)
    return shapes.replace(values=values, scale=scale, factor=factor, bias=bias)


def _bias(
    shapes: PackedExpertLinear | Float4Linear, places: Any, key: Array, spread: float
) -> Array | None:
    if (bias := shapes.bias) is None:
        return None
    return _scales(bias.shape, bias.dtype, places.bias)(key, spread)


def _scales_and_factor(
    shapes: PackedExpertLinear | Float4Linear, places: Any, keys: tuple[Array, Array], step: float
) -> tuple[Array, Array | None]:
    """Scales about ``step``, or a factor about that and scales about 1."""
    scale, factor = shapes.scale, shapes.factor
    if factor is not None:
        factor, step = _scales(factor.shape, factor.dtype, places.factor)(keys[1], step), 1.0
    if shapes.scale_code == "e5m3":
        return _near_one(scale.shape, places.scale)(keys[0]), factor
    if scale.dtype == jnp.uint8:
        return _exponents(scale.shape, places.scale)(keys[0], step), factor
    return _scales(scale.shape, scale.dtype, places.scale)(keys[0], step), factor


@functools.cache
def _bytes(shape: tuple[int, ...], code: Code, place: Any) -> Any:
    """From a key to bytes in the order of packed_expert_product."""

    def generate(key: Array) -> Array:
        random = jax.random.bits(key, shape, jnp.uint8)
        return stored_order(random & SMALL_E4M3 if code == "e4m3" else random, code)

    return jax.jit(generate, out_shardings=place)


@functools.cache
def _exponents(shape: tuple[int, ...], place: Any) -> Any:
    """From a key to powers of two about ``step``, as bytes."""

    def generate(key: Array, step: float) -> Array:
        about = 127 + jnp.round(jnp.log2(step)).astype(jnp.int32)
        return (about + jax.random.randint(key, shape, -1, 2, jnp.int8)).astype(jnp.uint8)

    return jax.jit(generate, out_shardings=place)


@functools.cache
def _near_one(shape: tuple[int, ...], place: Any) -> Any:
    """From a key to scales of e5m3 from 0.8 to 1.25."""

    def generate(key: Array) -> Array:
        return (ONE + jax.random.randint(key, shape, -3, 3, jnp.int8)).astype(jnp.uint8)

    return jax.jit(generate, out_shardings=place)


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
