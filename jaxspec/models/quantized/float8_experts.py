"""Weights of experts in 8-bit floats (e4m3), with a scale for each block of outputs and inputs.

Memory holds what the file holds. The weights of experts that rows choose are widened when they are
used: value times scale in float32, rounded once to the activations' dtype. Activations stay as they
are, unlike those of models/quantized/float8.py.
"""

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.models.mlps.expert_linear import AnyExpertLinear, ExpertLinear, PerExpert
from jaxspec.models.quantized.float8 import E4M3
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.models.wrapped_tensors import OutputsFirst
from jaxspec.parallel.pytree import array, pytree, static
from pallas_kernels.four_bits import widened_scales


@pytree
class Float8Experts(AnyExpertLinear):
    """y = x W[e] + b[e] for each expert e, where W is values times the scales of their blocks.

    Attributes:
      values: e4m3 [E, *out, in].
      scale: float32, or exponents (uint8, see four_bits.py), [E, *out, in], but for blocks of the
        last output dimension and of the input. The last block of either is shorter, if sizes are
        no multiple.
      block: outputs and inputs that share a scale.
      activations: the dtype of inputs and outputs.
    """

    values: Array = array()
    scale: Array = array()
    bias: Array | None = array(default=None)  # [E, *out]
    axes: tuple[str, ...] = static()
    block: tuple[int, int] = static()
    activations: jnp.dtype = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        experts, size, *outputs = self.axes
        return {
            "values": (experts, *outputs, size),
            "scale": (experts, *outputs[:-1], "group", "group"),
            "bias": (experts, *outputs),
        }

    @property
    def dtype(self) -> jnp.dtype:
        return self.activations

    @property
    def num_experts(self) -> int:
        return self.values.shape[0]

    @property
    def in_memory(self) -> None:
        return None

    def of(self, index: Array) -> Array:
        values, scale = self.values[index], widened_scales(self.scale[index])
        for axis, size in zip((values.ndim - 2, values.ndim - 1), self.block, strict=True):
            repeated = jnp.repeat(scale, min(size, values.shape[axis]), axis)
            scale = lax.slice_in_dim(repeated, 0, values.shape[axis], axis=axis)
        wide = (values.astype(jnp.float32) * scale).astype(self.dtype)
        return jnp.moveaxis(wide, -1, 1 - self.values.ndim)

    def mapped(self, source: Source, tensor_map: TensorMap) -> "Float8Experts":
        assert isinstance(source, PerExpert)
        outputs_first = PerExpert(tuple(map(OutputsFirst, source.experts)))
        return self.replace(
            values=tensor_map.of_source(outputs_first, "values", self.values),
            scale=tensor_map.of_source(outputs_first, "blocks", self.scale),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )


def float8_experts_shape(
    linear: ExpertLinear, block: tuple[int, int], scale_dtype: jnp.dtype
) -> Float8Experts:
    """A Float8Experts of ShapeDtypeStructs in place of an ExpertLinear of such."""
    experts, size, *outputs = linear.weight.shape
    rows, columns = -(-outputs[-1] // block[0]), -(-size // block[1])
    return Float8Experts(
        values=array_shape(experts, *outputs, size, dtype=E4M3),
        scale=array_shape(experts, *outputs[:-1], rows, columns, dtype=scale_dtype),
        bias=linear.bias,
        axes=linear.axes,
        block=block,
        activations=jnp.dtype(linear.dtype),
    )
