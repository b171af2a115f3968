"""Experts' weights of 4 or 8 bits, as the kernel reads them, and their numbers in plain jnp."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import four_bits
from pallas_kernels.four_bits import ScaleCode, widened_pairs, widened_scales
from pallas_kernels.packed_order import file_order

Code = four_bits.Code | Literal["e4m3"]  # the latter: floats of 8 bits, one in a byte
# Of zeros in memory, and of numbers in the kernel: 128, where the step of bfloat16 is 1, and the 8
# with which int4 are stored.
BIAS = 136


def bits_of(code: Code) -> int:
    return 8 if code == "e4m3" else 4


@dataclasses.dataclass(frozen=True)
class Format:
    """How experts are stored. Attributes as of PackedExperts."""

    code: Code
    block: tuple[int, int]
    scale_dtype: str
    scale_code: ScaleCode = "e8m0"
    has_factor: bool = False
    has_zero: bool = False

    @property
    def bits(self) -> int:
        """The bits of a number."""
        return bits_of(self.code)


# As most are published.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "fp8": Format("e4m3", (128, 128), "float32"),
        "mxfp8": Format("e4m3", (1, 32), "uint8"),
        "mxfp4": Format("e2m1", (1, 32), "uint8"),
        "nvfp4": Format("e2m1", (1, 16), "uint8", "e5m3", has_factor=True),
        "int4": Format("int4", (1, 32), "bfloat16"),
        "int4-zeros": Format("int4", (1, 128), "float16", has_zero=True),
    }
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """w = (number - zero) * scale * factor of one projection of every expert.

    Attributes:
      values: uint8 [E, P, F, bytes], where P projections (gate and up: 2) have F outputs each;
        stored as packed_order.py says.
      scale: of blocks, float32 [E, P, rows, columns] of outputs and inputs, of which the last may
        be shorter. Of groups of inputs, [E, P, groups, F]: floats, or bytes (uint8).
      factor: float32 [E, P, F], or None: all 1.
      code: of the numbers.
      block: outputs and inputs that share a scale; the former is 1 where there are groups.
      scale_code: of scales that are bytes; those of e5m3 are neither 0 nor subnormal.
      zero: of int4 in groups, bfloat16 as ``scale``, plus BIAS; None: all 0.
    """

    values: Array
    scale: Array
    factor: Array | None
    code: Code = dataclasses.field(metadata={"static": True})
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})
    scale_code: ScaleCode = dataclasses.field(default="e8m0", metadata={"static": True})
    zero: Array | None = None

    @property
    def bits(self) -> int:
        """The bits of a number."""
        return bits_of(self.code)

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
        scale = widened_scales(self.scale[index], self.scale_code)
        if self.block[0] > 1:
            for axis, size in ((-2, self.block[0]), (-1, self.block[1])):
                scale = jnp.repeat(scale, size, axis)
            scale = scale[..., : self.width, : self.depth]
        else:
            scale = self._by_input(scale)
        if self.factor is not None:
            scale = scale * self.factor[index][..., None]
        numbers = numbers_of(self.values[index], self.code)
        if self.zero is not None:
            numbers = numbers - self._by_input(self.zero[index].astype(jnp.float32) - BIAS)
        return numbers * scale

    def _by_input(self, groups: Array) -> Array:
        """[..., F, in] of [..., groups, F]."""
        return jnp.repeat(jnp.swapaxes(groups, -1, -2), self.block[1], -1)


def numbers_of(values: Array, code: Code) -> Array:
    """Float32 numbers [..., in] in input order of bytes uint8 [..., n] as they are stored."""
    ordered = file_order(values, code)
    if code != "e4m3":
        return widened_pairs(ordered, code)
    return lax.bitcast_convert_type(ordered, jnp.float8_e4m3fn).astype(jnp.float32)
