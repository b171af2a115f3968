"""The shared expert as the last of a layer's experts, where both have the same size and format.

All rows choose it. The kernel packed_expert_product then computes it beside the others: two
launches less, and none that round its inputs. Loaders put it there where that kernel runs.
"""

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.models.mlps.dense import Dense
from jaxspec.models.mlps.experts import Experts
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.packed_experts import PackedExpertLinear
from pallas_kernels.packed_order import stored_order


def shared_among(experts: Experts) -> Experts:
    """The same experts with the shared one as the last of them, if it fits there exactly."""
    if not fits(experts) or not all(_is_in_blocks(*pair) for pair in _pairs(experts)):
        return experts
    return joined(experts)


def fits(experts: Experts) -> bool:
    """Whether sizes and formats let the shared expert be one of the others."""
    config = experts.config
    activations = config.activation, config.shared_activation
    if experts.shared is None or config.latent is not None or activations != (None, None):
        return False
    return not config.weighs_input and all(_alike(*pair) for pair in _pairs(experts))


def joined(experts: Experts) -> Experts:
    """``shared_among`` of experts that fit, whose shared expert has the scales of whole blocks."""
    gate_up, down = (_with_last(*pair) for pair in _pairs(experts))
    return experts.replace(gate_up=gate_up, down=down, shared=None)


def _pairs(experts: Experts) -> tuple[tuple[PackedExpertLinear, Float8Linear], ...]:
    """Each projection of the experts, and the shared expert's."""
    shared = experts.shared
    assert isinstance(shared, Dense)
    return (experts.gate_up, shared.gate_up), (experts.down, shared.down)  # pyright: ignore


def _alike(linear: PackedExpertLinear, shared: Float8Linear) -> bool:
    if not isinstance(linear, PackedExpertLinear) or not isinstance(shared, Float8Linear):
        return False
    rest = linear.bias, linear.factor, shared.bias, shared.input_scale
    if linear.code != "e4m3" or linear.block[0] == 1 or any(array is not None for array in rest):
        return False  # numbers of 4 bits, or scales of groups
    same_size = linear.values.shape[1:] == shared.values.shape
    return same_size and linear.scale.shape[-1] == len(shared.scale)


def _is_in_blocks(linear: PackedExpertLinear, shared: Float8Linear) -> bool:
    """Whether all outputs of each block have the same scales."""
    scale, size = _by_input_block(shared), shared.out_shape[-1]
    of_blocks = jnp.repeat(scale[..., :: linear.block[0], :], linear.block[0], axis=-2)
    return bool(jnp.all(of_blocks[..., :size, :] == scale))


def _with_last(linear: PackedExpertLinear, shared: Float8Linear) -> PackedExpertLinear:
    values = stored_order(lax.bitcast_convert_type(shared.values, jnp.uint8), linear.code)
    scale = _by_input_block(shared)[..., :: linear.block[0], :].astype(linear.scale.dtype)
    return linear.replace(
        values=jnp.concatenate([linear.values, values[None]]),
        scale=jnp.concatenate([linear.scale, scale[None]]),
    )


def _by_input_block(shared: Float8Linear) -> Array:
    """Scales [*out, n] of n blocks of inputs."""
    return jnp.moveaxis(shared.scale, 0, -1)
