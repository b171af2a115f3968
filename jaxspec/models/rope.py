"""Rotary position embedding: frequencies, and the cosines and sines of positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.config.rope import Llama3RopeScaling, RopeConfig
from jaxspec.config.yarn import YarnRopeScaling


def rope_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per position, float32 [D / 2] or of as many entries as are rotated, scaled if the
    config says so. Without rotation all D / 2 are 0."""
    if rope.rotary_dim == 0:
        return np.zeros(rope.head_dim // 2, np.float32)
    width = rope.rotary_dim or rope.head_dim
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = np.float32(rope.theta) ** -exponents
    match rope.scaling:
        case Llama3RopeScaling() as scaling:
            return _scale_llama3(frequencies, scaling)
        case YarnRopeScaling() as scaling:
            return _scale_yarn(frequencies, scaling, rope.theta)
    return frequencies


def _scale_llama3(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Low frequencies are divided by ``factor``, high ones kept, those between interpolated."""
    rotations = np.float32(scaling.original_max_position / (2 * math.pi)) * frequencies
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - np.float32(scaling.low_freq_factor)) / np.float32(span), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / np.float32(scaling.factor))


def _scale_yarn(frequencies: np.ndarray, scaling: YarnRopeScaling, theta: float) -> np.ndarray:
    """High frequencies are kept, low ones divided by ``factor``, those between interpolated by
    their index."""
    count, original = len(frequencies), scaling.original_max_position

    def place(turns: float) -> float:
        """The index, perhaps between two, of the frequency that turns so often."""
        return count * math.log(original / (2 * math.pi * turns)) / math.log(theta)

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, 2.0 * count - 1)
    divided = np.clip((np.arange(count) - first) / max(last - first, 1e-3), 0.0, 1.0)
    divided = divided.astype(np.float32)
    return frequencies * (1 - divided + divided / np.float32(scaling.factor))


@jax.named_scope("rope")
def rope_angles(rope: RopeConfig, positions: Array) -> Array:
    """Cosines, then sines, of each position's rotations: int [B, T] -> float32 [B, T, 2, 2, D / 2].
    If only the first entries of a head are rotated, the last dimension is half of their number.

    The fourth dimension is for the two halves of a head; the sine of the first half is negated. The
    result is a single array so that XLA computes it in one kernel: every drafting step needs it.
    On CPUs XLA would compute it again in every layer, for every head, if it could look through.
    """
    angles = positions[..., None, None, None].astype(jnp.float32) * rope_frequencies(rope)
    is_cosine = np.array([True, False])[:, None, None]
    sign = np.array([-1.0, 1.0], np.float32)[:, None]
    turns = jnp.where(is_cosine, jnp.cos(angles), jnp.sin(angles) * sign)
    if isinstance(rope.scaling, YarnRopeScaling):
        turns = turns * rope.scaling.attention_factor
    return lax.optimization_barrier(turns)
