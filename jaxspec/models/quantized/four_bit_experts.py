"""Experts whose weights are numbers of 4 bits with scales of groups of inputs, as published."""

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array

from jaxspec.models.mlps.expert_linear import AnyExpertLinear, ExpertLinear, PerExpert
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.models.wrapped_tensors import OutputsFirst
from jaxspec.parallel.pytree import array, pytree, static
from pallas_kernels.four_bits import (
    Code,
    scaled_groups,
    widened_pairs,
    widened_scales,
)

# The names of checkpoints' tensors.
KINDS: Mapping[Code, str] = MappingProxyType({"int4": "pairs", "e2m1": "codes"})


@pytree
class FourBitExperts(AnyExpertLinear):
    """w = (number - zero) * scale * factor, of which memory holds what the file has.

    Only the experts that are asked for are widened: in float32, then rounded to the dtype of
    activations.

    Attributes:
      pairs: uint8 [E, *out, in / 2], two numbers in a byte (see four_bits.py).
      scale: [E, *out, n] of n groups of consecutive inputs: floats, or exponents (uint8).
      zero: whole numbers, as ``scale``; None: all 0.
      factor: float32 [E, *out]; None: all 1.
      code: of the numbers.
      activations: the dtype of inputs and outputs.
    """

    pairs: Array = array()
    scale: Array = array()
    zero: Array | None = array(default=None)
    factor: Array | None = array(default=None)
    bias: Array | None = array(default=None)  # [E, *out]
    axes: tuple[str, ...] = static()
    code: Code = static()
    activations: jnp.dtype = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        experts, size, *outputs = self.axes
        by_output = (experts, *outputs)
        by_group = (*by_output, size)
        return {
            **{"pairs": by_group, "scale": by_group, "zero": by_group},
            **{"factor": by_output, "bias": by_output},
        }

    @property
    def dtype(self) -> jnp.dtype:
        return self.activations

    @property
    def num_experts(self) -> int:
        return self.pairs.shape[0]

    @property
    def in_memory(self) -> None:
        return None

    def of(self, index: Array) -> Array:
        scales = widened_scales(self.scale[index])
        if self.factor is not None:
            scales = scales * self.factor[index][..., None]
        zeros = None if self.zero is None else self.zero[index].astype(jnp.float32)
        weights = scaled_groups(widened_pairs(self.pairs[index], self.code), scales, zeros)
        return jnp.moveaxis(weights.astype(self.dtype), -1, 1 - self.pairs.ndim)

    def mapped(self, source: Source, tensor_map: TensorMap) -> "FourBitExperts":
        assert isinstance(source, PerExpert)
        inputs_last = PerExpert(tuple(map(OutputsFirst, source.experts)))
        return self.replace(
            pairs=tensor_map.of_source(inputs_last, KINDS[self.code], self.pairs),
            scale=tensor_map.of_source(inputs_last, "scale", self.scale),
            zero=tensor_map.of_source(inputs_last, "zero", self.zero),
            factor=tensor_map.of_source(source, "factor", self.factor),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )


def four_bit_experts_shape(
    linear: ExpertLinear,
    code: Code,
    num_groups: int,
    scale_dtype: jnp.dtype,
    *,
    zero: bool = False,
    factor: bool = False,
) -> FourBitExperts:
    """A FourBitExperts of ShapeDtypeStructs in place of an ExpertLinear of such.

    ``zero``, ``factor``: whether it has them.
    """
    experts, size, *outputs = linear.weight.shape
    by_group = (experts, *outputs, num_groups)
    return FourBitExperts(
        pairs=array_shape(experts, *outputs, size // 2, dtype=jnp.dtype("uint8")),
        scale=array_shape(*by_group, dtype=scale_dtype),
        zero=array_shape(*by_group, dtype=scale_dtype, when=zero),
        factor=array_shape(experts, *outputs, dtype=jnp.dtype("float32"), when=factor),
        bias=linear.bias,
        axes=linear.axes,
        code=code,
        activations=jnp.dtype(linear.dtype),
    )
