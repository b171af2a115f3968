"""Weights to integers of a few bits: scales and zeros of groups of inputs, and rounding to nearest.

A weight [out, in] is (value - zero) * scale, with a scale and a zero for each output and group.
Values are signed: -2^(bits-1) .. 2^(bits-1) - 1.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.round_tokens import round_tokens

SCALE = jnp.dtype("float16")  # as AWQ and GPTQ files have it
SMALLEST_SCALE = float(jnp.finfo(SCALE).smallest_subnormal)
LARGEST_SCALE = float(jnp.finfo(SCALE).max)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The numbers that weights are rounded to.

    Attributes:
      bits: of a value.
      group: inputs that share a scale; None: all of them.
      symmetric: zeros are 0; else each group has its own.
    """

    bits: int
    group: int | None
    symmetric: bool

    @property
    def lowest(self) -> int:
        return -(2 ** (self.bits - 1))

    @property
    def highest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def num_groups(self, size: int) -> int:
        """Groups of ``size`` inputs. Raises ValueError if the group does not divide them."""
        group = self.group or size
        if size % group:
            raise ValueError(f"a group of {group} does not divide {size} inputs")
        return size // group


class Rounded(NamedTuple):
    """A quantized projection, inputs last.

    Attributes:
      values: int8 [out, in], or e4m3.
      scale: float16 [out, n] of n groups; float32 for e4m3.
      zero: int8 [out, n]; None: all 0.
      groups: int32 [in], the group of each input; None: input k has group k // (in / n).
    """

    values: Array
    scale: Array
    zero: Array | None = None
    groups: Array | None = None

    def rows(self, start: int, stop: int) -> "Rounded":
        """Some of the outputs."""
        zero = None if self.zero is None else self.zero[start:stop]
        return Rounded(self.values[start:stop], self.scale[start:stop], zero, self.groups)

    def dense(self) -> Array:
        """The float32 weights [out, in] that it stands for."""
        values, scale = self.values.astype(jnp.float32), self.scale.astype(jnp.float32)
        zero = jnp.zeros_like(scale) if self.zero is None else self.zero.astype(jnp.float32)
        if self.groups is not None:
            return (values - zero[:, self.groups]) * scale[:, self.groups]
        grouped = values.reshape(*scale.shape, -1)
        return ((grouped - zero[..., None]) * scale[..., None]).reshape(values.shape)


def fit(weight: Array, grid: Grid) -> tuple[Array, Array]:
    """Scales and zeros, float32 [...], of groups of weights [..., size]: the range of a group is
    that of its weights.

    Scales are numbers of float16. Asymmetric ranges hold 0, so that 0 stays nearly exact.
    """
    steps = grid.highest - grid.lowest
    if grid.symmetric:
        low, high = None, 2 * jnp.max(jnp.abs(weight), axis=-1)
    else:
        low = jnp.min(weight, axis=-1, initial=0.0)
        high = jnp.max(weight, axis=-1, initial=0.0) - low
    span = jnp.where(high > 0, high, steps)
    scale = jnp.clip(span / steps, SMALLEST_SCALE, LARGEST_SCALE)
    scale = scale.astype(SCALE).astype(jnp.float32)
    if low is None:
        return scale, jnp.zeros_like(scale)
    zero = jnp.clip(jnp.round(grid.lowest - low / scale), grid.lowest, grid.highest)
    return scale, zero


def nearest(weight: Array, scale: Array, zero: Array, grid: Grid) -> Array:
    """The nearest values, as float32; ``scale`` and ``zero`` broadcast against ``weight``."""
    return jnp.clip(jnp.round(weight / scale + zero), grid.lowest, grid.highest)


def rounded(values: Array, scale: Array, zero: Array, groups: Array | None, grid: Grid) -> Rounded:
    """A Rounded of float32 arrays of integers and scales."""
    return Rounded(
        values=values.astype(jnp.int8),
        scale=scale.astype(SCALE),
        zero=None if grid.symmetric else zero.astype(jnp.int8),
        groups=groups,
    )


def by_group(weight: Array, grid: Grid) -> Array:
    """[out, in] -> [out, n, group]."""
    return weight.reshape(len(weight), grid.num_groups(weight.shape[1]), -1)


def round_to_nearest(weight: Array, grid: Grid, limit: Array | None = None) -> Rounded:
    """Each weight [out, in] to the nearest value of its group.

    ``limit``: float32 [out, n]; larger weights of a group are clipped to it first.
    """
    grouped = by_group(weight.astype(jnp.float32), grid)
    if limit is not None:
        grouped = jnp.clip(grouped, -limit[..., None], limit[..., None])
    scale, zero = fit(grouped, grid)
    values = nearest(grouped, scale[..., None], zero[..., None], grid)
    return rounded(values.reshape(weight.shape), scale, zero, None, grid)


def as_rounded(weight: Array, grid: Grid) -> Array:
    """The float32 weights [out, in] after rounding to nearest."""
    return round_to_nearest(weight, grid).dense()


def round_to_float8(weight: Array) -> Rounded:
    """Weights [out, in] as e4m3 with a scale for each output, as FP8_DYNAMIC stores them."""
    values, scale = round_tokens(weight)  # a kernel pads the scales
    return Rounded(values, scale[0, : len(weight), None])


def output_error(weight: Array, changed: Array, hessian: Array) -> Array:
    """Mean square of the change in a projection's outputs, divided by their mean square.

    Weights are [out, in]; ``hessian`` [in, in] is the sum of x xᵀ over inputs x.
    """

    def energy(matrix: Array) -> Array:
        product = jnp.matmul(matrix, hessian, precision="highest")
        return jnp.sum(product * matrix)

    return energy(changed - weight) / energy(weight)
