"""Experts of 4 or 8 bits as the kernel packed_expert_product reads them.

Loaders make them of what a file holds where the kernel runs, on one Hopper GPU: the same weights,
in another order, and with the scales of NVFP4 as other bytes.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.quantization import ExpertFormat
from jaxspec.models.mlps.expert_linear import AnyExpertLinear, ExpertLinear
from jaxspec.models.quantized.float8 import E4M3
from jaxspec.models.quantized.float8_experts import Float8Experts
from jaxspec.models.quantized.four_bit_experts import FourBitExperts
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import Source, TensorMap
from jaxspec.parallel.pytree import array, pytree, static
from pallas_kernels.four_bits import ScaleCode, widened_scales
from pallas_kernels.packed_expert_product import weights_misfit
from pallas_kernels.packed_expert_product.scales import with_e5m3_scales
from pallas_kernels.packed_experts import BIAS, FORMATS, Code, PackedExperts
from pallas_kernels.packed_order import stored_order


@pytree
class PackedExpertLinear(AnyExpertLinear):
    """y = x W[e] + b[e] for each expert e.

    Attributes:
      values: uint8 [E, *out, bytes], see packed_order.py.
      scale: of blocks, float32 [E, *out, in] by those of the last output dimension and of the
        input, of which the last may be shorter; of groups, [E, *out, n] with n groups of inputs
        before the last output dimension.
      zero: bfloat16 as ``scale``, whole numbers plus BIAS; None: all 0.
      factor: float32 [E, *out]; None: all 1.
      code: of the numbers.
      block: outputs and inputs that share a scale.
      scale_code: of scales that are bytes.
      activations: the dtype of inputs and outputs.
    """

    values: Array = array()
    scale: Array = array()
    zero: Array | None = array(default=None)
    factor: Array | None = array(default=None)
    bias: Array | None = array(default=None)  # [E, *out]
    axes: tuple[str, ...] = static()
    code: Code = static()
    block: tuple[int, int] = static()
    scale_code: ScaleCode = static(default="e8m0")
    activations: jnp.dtype = static()

    @property
    def packed(self) -> PackedExperts:
        """The weights as the kernel takes them, all outputs but those of the last dimension as
        parts."""
        experts, *outputs, size = self.values.shape
        parts, blocks = (experts, -1, outputs[-1]), (experts, -1, *self.scale.shape[-2:])
        return PackedExperts(
            values=self.values.reshape(*parts, size),
            scale=self.scale.reshape(blocks),
            zero=None if self.zero is None else self.zero.reshape(blocks),
            factor=None if self.factor is None else self.factor.reshape(parts),
            code=self.code,
            block=self.block,
            scale_code=self.scale_code,
        )

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        experts, size, *outputs = self.axes
        by_output = (experts, *outputs)
        blocks = ("group", "group") if self.block[0] > 1 else (size, outputs[-1])
        return {
            "values": (*by_output, size),
            **{"scale": (*by_output[:-1], *blocks), "zero": (*by_output[:-1], *blocks)},
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
        case Float8Experts():
            made = _of_float8(experts)
        case FourBitExperts():
            made = _of_four_bits(experts)
        case _:
            return experts
    if weights_misfit(made.packed) is not None:
        return experts
    return made.replace(values=stored_order(made.values, made.code))


def _of_float8(experts: Float8Experts) -> PackedExpertLinear:
    """With values in the order of a file."""
    values, scale, block, factor = experts.values, experts.scale, experts.block, None
    if block[0] > 1:
        scale = widened_scales(scale)
    elif scale.shape[-1] == 1:  # of each output: a factor of blocks without scales
        factor, block = widened_scales(scale)[..., 0], (values.shape[-2], values.shape[-1])
        scale = jnp.ones((*scale.shape[:-2], 1, 1), jnp.float32)
    else:
        scale = jnp.swapaxes(scale, -1, -2)
    return PackedExpertLinear(
        values=lax.bitcast_convert_type(values, jnp.uint8),
        scale=scale,
        factor=factor,
        bias=experts.bias,
        axes=experts.axes,
        code="e4m3",
        block=block,
        activations=jnp.dtype(experts.dtype),
    )


def _of_four_bits(experts: FourBitExperts) -> PackedExpertLinear:
    """With values in the order of a file."""
    pairs, scale, zero = experts.pairs, experts.scale, experts.zero
    group, scale_code = 2 * pairs.shape[-1] // scale.shape[-1], "e8m0"
    if experts.code == "e2m1" and scale.dtype == E4M3:
        scale_code = "e5m3"
        pairs, scale = with_e5m3_scales(pairs, scale)
    if zero is not None:
        zero = jnp.swapaxes(zero.astype(jnp.bfloat16) + BIAS, -1, -2)
    return PackedExpertLinear(
        values=pairs,
        scale=jnp.swapaxes(scale, -1, -2),
        zero=zero,
        factor=experts.factor,
        bias=experts.bias,
        axes=experts.axes,
        code=experts.code,
        block=(1, group),
        scale_code=scale_code,
        activations=jnp.dtype(experts.dtype),
    )


def packed_experts_shape(linear: ExpertLinear, name: ExpertFormat) -> PackedExpertLinear:
    """A PackedExpertLinear of ShapeDtypeStructs in a format, in place of an ExpertLinear of such.

    Raises ValueError for sizes that the kernel does not take.
    """
    stored = FORMATS[name]
    experts, size, *lead, width = linear.weight.shape
    outputs, inputs = stored.block
    blocks = (-(-width // outputs), -(-size // inputs)) if outputs > 1 else (size // inputs, width)
    made = PackedExpertLinear(
        values=array_shape(
            experts, *lead, width, size * stored.bits // 8, dtype=jnp.dtype("uint8")
        ),
        scale=array_shape(experts, *lead, *blocks, dtype=jnp.dtype(stored.scale_dtype)),
        zero=array_shape(experts, *lead, *blocks, dtype=jnp.bfloat16, when=stored.has_zero),
        factor=array_shape(
            experts, *lead, width, dtype=jnp.dtype("float32"), when=stored.has_factor
        ),
        bias=linear.bias,
        axes=linear.axes,
        code=stored.code,
        block=stored.block,
        scale_code=stored.scale_code,
        activations=jnp.dtype(linear.dtype),
    )
    packed = jax.eval_shape(lambda experts: experts.packed, made)
    if (problem := weights_misfit(packed)) is not None:
        raise ValueError(f"the kernel cannot take experts of {problem}")
    return made
