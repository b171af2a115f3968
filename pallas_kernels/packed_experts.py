"""Experts' weights of 4 or 8 bits, as the kernel reads them, and their numbers in plain jnp."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import four_bits
from pallas_kernels.four_bits import widened_pairs, widened_scales
from pallas_kernels.packed_expert_product.order import file_order

Code = four_bits.Code | Literal["e4m3"]  # the latter: floats of 8 bits, one in a byte


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """w = number * scale * factor of one projection of every expert.

    Attributes:
      values: uint8 [E, P, F, bytes], where P projections (gate and up: 2) have F outputs each;
        stored as order.py says.
      scale: of e4m3, float32 [E, P, rows, columns] of blocks of outputs and inputs, of which the
        last may be shorter. Of others, [E, P, groups, F] of groups of inputs: floats, or uint8
        exponents, 2^(byte - 127).
      factor: float32 [E, P, F], or None: all 1.
      code: of the numbers.
      block: outputs and inputs that share a scale; the former is 1 where there are groups.
    """

    values: Array
    scale: Array
    factor: Array | None
    code: Code = dataclasses.field(metadata={"static": True})
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def bits(self) -> int:
        """Of a number."""
        return 8 if self.code == "e4m3" else 4

    @property
    def num_experts(self) -> int:
        return self.values.shape[0]

    @property
    def parts(self) -> int:
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """Outputs of a part."""
        return self.values.shape[2]

    @property
    def depth(self) -> int:
        """Inputs."""
        return self.values.shape[3] * 8 // self.bits

    def of(self, index: Array) -> Array:
        """Weights float32 [..., P, F, in] of the experts that ``index`` int [...] chooses, in
        input order."""
        scale = widened_scales(self.scale[index])
        if self.code == "e4m3":
            for axis, size in ((-2, self.block[0]), (-1, self.block[1])):
                scale = jnp.repeat(scale, size, axis)
            scale = scale[..., : self.width, : self.depth]
        else:
            scale = jnp.repeat(jnp.swapaxes(scale, -1, -2), self.block[1], -1)
        if self.factor is not None:
            scale = scale * self.factor[index][..., None]
        return numbers_of(self.values[index], self.code) * scale


def numbers_of(values: Array, code: Code) -> Array:
    """Float32 numbers [..., in] in input order of bytes uint8 [..., n] as they are stored."""
    ordered = file_order(values, code)
    if code != "e4m3":
        return widened_pairs(ordered, code)
    return lax.bitcast_convert_type(ordered, jnp.float8_e4m3fn).astype(jnp.float32)
