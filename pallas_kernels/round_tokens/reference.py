"""Rounding of rows to 8-bit floats in plain jnp."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import FLOAT8, LARGEST

# Rows without a larger entry count as 0: the reciprocal of a smaller scale could overflow.
SMALLEST = 1e-30
GROUP = 128  # entries that share a scale where the kernel has several groups


# jit: outside of a program this is one, instead of one for each step.
@functools.partial(jax.jit, static_argnames=("num_groups", "padded"))
def round_tokens_reference(x: Array, num_groups: int, padded: int) -> tuple[Array, Array]:
    """See pallas_kernels.round_tokens.round_tokens; ``padded``: rows that the scales have."""
    groups = x.astype(jnp.float32).reshape(len(x), num_groups, -1)
    largest = jnp.max(jnp.abs(groups), axis=-1)  # [M, n]
    scale = scale_of(largest)
    rounded = rounded_by(groups, scale[..., None]).reshape(x.shape)
    return rounded, jnp.pad(scale.T, ((0, 0), (0, padded - len(x))))


def scale_of(largest: Array) -> Array:
    """The scale of entries of which the largest is this. Compilers may turn a division by a
    constant into this product, so it is one everywhere."""
    return jnp.where(largest > SMALLEST, largest, 1.0) * (1 / LARGEST)


def rounded_by(x: Array, scale: Array) -> Array:
    """Float32 entries over a scale, as e4m3. They are multiplied by its reciprocal: a division of
    every entry would take a GPU longer than the rest of the rounding."""
    return jnp.clip(x * (1 / scale), -LARGEST, LARGEST).astype(FLOAT8)
