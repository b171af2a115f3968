"""What positions do to queries and keys: cosines and sines of rotations, and factors of queries."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.config.rope import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    QueryScaling,
    RopeConfig,
    YarnRopeScaling,
)


def rope_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per position, float32 [D / 2] or of as many entries as are rotated, scaled as the
    config says. Without rotation all D / 2 are 0."""
    if rope.rotary_dim == 0:
        return np.zeros(rope.head_dim // 2, np.float32)
    width = rope.rotary_dim or rope.head_dim
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = np.float32(rope.theta) ** -exponents
    match rope.scaling:
        case Llama3RopeScaling() as scaling:
            return _scale_llama3(frequencies, scaling)
        case LinearRopeScaling(factor):
            return frequencies / np.float32(factor)
        case YarnRopeScaling() as scaling:
            return _scale_yarn(frequencies, scaling, rope.theta)
        case LongRopeScaling(factors):
            return frequencies / np.asarray(factors, np.float32)
        case ProportionalRopeScaling(pairs):
            return np.where(np.arange(len(frequencies)) < pairs, frequencies, np.float32(0))
    return frequencies


def _scale_llama3(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Low frequencies are divided by ``factor``, high ones kept, those between interpolated."""
    rotations = np.float32(scaling.original_max_position / (2 * math.pi)) * frequencies
    span = scaling.high_freq_factor - scaling.low_freq_factor
    if span == 0:  # there are none between
        low = rotations < np.float32(scaling.low_freq_factor)
        return np.where(low, frequencies / np.float32(scaling.factor), frequencies)
    keep = np.clip((rotations - np.float32(scaling.low_freq_factor)) / np.float32(span), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / np.float32(scaling.factor))


def _scale_yarn(frequencies: np.ndarray, scaling: YarnRopeScaling, theta: float) -> np.ndarray:
    """The ramp of YaRN's equations: linear in the index of the frequency between two of them."""
    count = len(frequencies)

    def index_of(rotations: float) -> float:
        """Where a frequency has so many rotations within the original positions."""
        wavelength = scaling.original_max_position / (2 * math.pi * rotations)
        return count * math.log(wavelength) / math.log(theta)

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    span = (last - first) or 0.001
    divided = np.clip((np.arange(count, dtype=np.float32) - first) / span, 0.0, 1.0)
    return frequencies * (1 - divided) + frequencies / np.float32(scaling.factor) * divided


def _attention_factor(rope: RopeConfig) -> float:
    if isinstance(rope.scaling, YarnRopeScaling | LongRopeScaling):
        return 1.0 if rope.rotary_dim == 0 else rope.scaling.attention_factor
    return 1.0


@jax.named_scope("rope")
def rope_angles(rope: RopeConfig, positions: Array) -> Array:
    """Cosines, then sines, of each position's rotations: int [B, T] -> float32 [B, T, 2, 2, D / 2].
    If only the first entries of a head are rotated, the last dimension is half of their number.
    With YaRN and LongRoPE cosines and sines are multiplied by their attention factor.

    The fourth dimension is for the two halves of a head; the sine of the first half is negated. The
    result is a single array so that XLA computes it in one kernel: every drafting step needs it.
    On CPUs XLA would compute it again in every layer, for every head, if it could look through.
    """
    angles = positions[..., None, None, None].astype(jnp.float32) * rope_frequencies(rope)
    is_cosine = np.array([True, False])[:, None, None]
    sign = np.array([-1.0, 1.0], np.float32)[:, None]
    table = jnp.where(is_cosine, jnp.cos(angles), jnp.sin(angles) * sign)
    factor = _attention_factor(rope)
    return lax.optimization_barrier(table if factor == 1 else table * np.float32(factor))


@jax.named_scope("rope")
def query_factors(scaling: QueryScaling, positions: Array) -> Array:
    """What queries at int positions [B, T] are multiplied by: float32 [B, T]. A draft head may have
    an entry before the first position, which counts as the first."""
    counted = jnp.maximum(positions, 0)
    counted = counted + scaling.first if scaling.first else counted
    spans = counted // scaling.original_max_position
    factors = 1 + np.float32(scaling.beta) * jnp.log1p(spans.astype(jnp.float32))
    return lax.optimization_barrier(factors)  # as in rope_angles


def halves_of_pairs(x: Array) -> Array:
    """x [..., R], of which entries 2 i and 2 i + 1 are a pair, in an order in which i and i + R / 2
    are."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.moveaxis(pairs, -1, -2).reshape(x.shape)
