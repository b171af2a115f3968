"""Experts of 4 or 8 bits as the kernel packed_expert_product reads them.

Loaders make them of what a file holds where the kernel runs, on one Hopper GPU: the same numbers,
in another order.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.quantization import ExpertFormat
from jaxspec.models.mlps.expert_linear import AnyExpertLinear, ExpertLinear
from jaxspec.models.quantized.float8_experts import Float8Experts
from jaxspec.models.quantized.four_bit_experts import FourBitExperts
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.parallel.pytree import array, pytree, static
from pallas_kernels.four_bits import widened_scales
from pallas_kernels.packed_expert_product import weights_misfit
from pallas_kernels.packed_expert_product.order import stored_order
from pallas_kernels.packed_experts import Code, PackedExperts


@pytree
class PackedExpertLinear(AnyExpertLinear):
    """y = x W[e] + b[e] for each expert e.

    Attributes:
      values: uint8 [E, *out, bytes], see packed_expert_product/order.py.
      scale: of e4m3, float32 [E, *out, in] by blocks of the last output dimension and of the input,
        of which the last may be shorter; of others [E, *out, n] with n groups of inputs before the
        last output dimension.
      factor: float32 [E, *out]; None: all 1.
      code: of the numbers.
      block: outputs and inputs that share a scale.
      activations: the dtype of inputs and outputs.
    """

    values: Array = array()
    scale: Array = array()
    factor: Array | None = array(default=None)
    bias: Array | None = array(default=None)  # [E, *out]
    axes: tuple[str, ...] = static()
    code: Code = static()
    block: tuple[int, int] = static()
    activations: jnp.dtype = static()

    @property
    def packed(self) -> PackedExperts:
        """The weights as the kernel takes them, all outputs but those of the last dimension as
        parts."""
        experts, *outputs, size = self.values.shape
        parts = (experts, -1, outputs[-1])
        return PackedExperts(
            values=self.values.reshape(*parts, size),
            scale=self.scale.reshape(experts, -1, *self.scale.shape[-2:]),
            factor=None if self.factor is None else self.factor.reshape(parts),
            code=self.code,
            block=self.block,
        )

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        experts, size, *outputs = self.axes
        by_output = (experts, *outputs)
        blocks = ("group", "group") if self.code == "e4m3" else (size, outputs[-1])
        return {
            "values": (*by_output, size),
            "scale": (*by_output[:-1], *blocks),
            **{"factor": by_output, "bias": by_output},
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
        outputs = self.values.shape[1:-1]
        wide = self.packed.of(index).astype(self.dtype)
        return jnp.moveaxis(wide.reshape(*index.shape, *outputs, -1), -1, -1 - len(outputs))

    def mapped(self, source: Source, tensor_map: TensorMap) -> "PackedExpertLinear":
        raise ValueError("experts in the order of the kernel have no tensors in a file")


def packed_experts(experts: AnyExpertLinear) -> AnyExpertLinear:
    """The same experts as the kernel reads them; those that it does not read as they are."""
    match experts:
        case Float8Experts(values=values, block=block):
            scale, factor, code = widened_scales(experts.scale), None, "e4m3"
            stored = lax.bitcast_convert_type(values, jnp.uint8)
            if block[0] == 1:  # a scale for each output
                return experts
        case FourBitExperts(pairs=stored, zero=None, factor=factor, code=code):
            scale = jnp.swapaxes(experts.scale, -1, -2)
            block = (1, 2 * stored.shape[-1] // scale.shape[-2])
        case _:
            return experts
    made = PackedExpertLinear(
        values=stored,
        scale=scale,
        factor=factor,
        bias=experts.bias,
        axes=experts.axes,
        code=code,
        block=block,
        activations=jnp.dtype(experts.dtype),
    )
    if weights_misfit(made.packed) is not None:
        return experts
    return made.replace(values=stored_order(stored, code))


# The code of numbers, the outputs and inputs that share a scale, and its dtype, by name.
_FORMATS: dict[ExpertFormat, tuple[Code, tuple[int, int], str]] = {
    "fp8": ("e4m3", (128, 128), "float32"),
    "mxfp4": ("e2m1", (1, 32), "uint8"),
    "int4": ("int4", (1, 32), "bfloat16"),
}


def packed_experts_shape(linear: ExpertLinear, name: ExpertFormat) -> PackedExpertLinear:
    """A PackedExpertLinear of ShapeDtypeStructs in a format, in place of an ExpertLinear of such.

    Raises ValueError for sizes that the kernel does not take.
    """
    code, (outputs, inputs), scale_dtype = _FORMATS[name]
    experts, size, *lead, width = linear.weight.shape
    rows = (-(-width // outputs), -(-size // inputs))
    blocks = rows if code == "e4m3" else (size // inputs, width)
    made = PackedExpertLinear(
        values=array_shape(
            experts, *lead, width, size if code == "e4m3" else size // 2, dtype=jnp.dtype("uint8")
        ),
        scale=array_shape(experts, *lead, *blocks, dtype=jnp.dtype(scale_dtype)),
        bias=linear.bias,
        axes=linear.axes,
        code=code,
        block=(outputs, inputs),
        activations=jnp.dtype(linear.dtype),
    )
    packed = jax.eval_shape(lambda experts: experts.packed, made)
    if (problem := weights_misfit(packed)) is not None:
        raise ValueError(f"the kernel cannot take experts of {problem}")
    return made
