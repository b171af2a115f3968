"""The shared expert as the last of a layer's experts, where it is in blocks of 8-bit floats and of
their size. All rows choose it. Loaders put it there where the kernels of packed experts run.

- Of others in the same format it becomes one more: packed_expert_product computes it beside them,
  two launches less, and none that round its inputs.
- Beside others of MXFP4 it is stored by itself (see mlps/last_expert.py), in the same order:
  expert_gate_up_down computes it in the same launch as them, seven launches less.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.models.mlps.dense import Dense
from jaxspec.models.mlps.experts import Experts
from jaxspec.models.mlps.last_expert import LastExpert
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.packed_experts import PackedExpertLinear
from pallas_kernels.packed_experts import FORMATS, bits_of
from pallas_kernels.packed_order import stored_order

BLOCK = FORMATS["fp8"].block


def shared_among(experts: Experts) -> Experts:
    """The same experts with the shared one as the last of them, if it fits there exactly."""
    way = way_of(experts)
    if way is None or not all(_is_in_blocks(*pair) for pair in _pairs(experts)):
        return experts
    return way(experts)


def way_of(experts: Experts) -> Callable[[Experts], Experts] | None:
    """How the shared expert becomes the last of the others, if its scales are those of whole
    blocks: a function of such experts. None: sizes or formats do not let it."""
    config = experts.config
    activations = config.activation, config.shared_activation
    if experts.shared is None or config.latent is not None or activations != (None, None):
        return None
    pairs = _pairs(experts)
    if config.weighs_input or not all(_can_be_last(*pair) for pair in pairs):
        return None
    codes = {linear.code for linear, _ in pairs}
    ways = {frozenset({"e4m3"}): _joined, frozenset({"e2m1"}): _beside}
    return ways.get(frozenset(codes))


def _joined(experts: Experts) -> Experts:
    (gate_up, down), (shared_gate_up, shared_down) = zip(*_pairs(experts), strict=True)
    both = _with_last(gate_up, shared_gate_up), _with_last(down, shared_down)
    return experts.replace(gate_up=both[0], down=both[1], shared=None)


def _beside(experts: Experts) -> Experts:
    gate_up, down = (_as_last(*pair) for pair in _pairs(experts))
    return experts.replace(last=LastExpert(gate_up=gate_up, down=down), shared=None)


def _pairs(experts: Experts) -> tuple[tuple[PackedExpertLinear, Float8Linear], ...]:
    """Each projection of the experts, and the shared expert's."""
    shared = experts.shared
    assert isinstance(shared, Dense)
    return (experts.gate_up, shared.gate_up), (experts.down, shared.down)  # pyright: ignore


def _can_be_last(linear: PackedExpertLinear, shared: Float8Linear) -> bool:
    if not isinstance(linear, PackedExpertLinear) or not isinstance(shared, Float8Linear):
        return False
    rest = linear.bias, linear.factor, shared.bias, shared.input_scale
    if any(array is not None for array in rest):
        return False
    if linear.code == "e2m1" and linear.scale_code != "e8m0":
        return False
    if linear.code == "e4m3" and linear.block[0] == 1:
        return False  # scales of groups
    *outputs, size = linear.values.shape[1:]
    same_size = (*outputs, size * 8 // bits_of(linear.code)) == shared.values.shape
    return same_size and -(-shared.values.shape[-1] // _block_of(linear)[1]) == len(shared.scale)


def _block_of(linear: PackedExpertLinear) -> tuple[int, int]:
    """Outputs and inputs of the shared expert's blocks."""
    return linear.block if linear.code == "e4m3" else BLOCK


def _is_in_blocks(linear: PackedExpertLinear, shared: Float8Linear) -> bool:
    """Whether all outputs of each block have the same scales."""
    size, _ = _block_of(linear)
    scale, outputs = _by_input_block(shared), shared.out_shape[-1]
    of_blocks = jnp.repeat(scale[..., ::size, :], size, axis=-2)
    return bool(jnp.all(of_blocks[..., :outputs, :] == scale))


def _with_last(linear: PackedExpertLinear, shared: Float8Linear) -> PackedExpertLinear:
    last = _as_last(linear, shared)
    return linear.replace(
        values=jnp.concatenate([linear.values, last.values]),
        scale=jnp.concatenate([linear.scale, last.scale.astype(linear.scale.dtype)]),
    )


def _as_last(linear: PackedExpertLinear, shared: Float8Linear) -> PackedExpertLinear:
    """The shared expert's projection as that of one expert."""
    values = stored_order(lax.bitcast_convert_type(shared.values, jnp.uint8), "e4m3")
    block = _block_of(linear)
    scale = _by_input_block(shared)[..., :: block[0], :].astype(jnp.float32)
    how = {"axes": linear.axes, "code": "e4m3", "block": block, "activations": linear.activations}
    return PackedExpertLinear(values=values[None], scale=scale[None], **how)


def _by_input_block(shared: Float8Linear) -> Array:
    """Scales [*out, n] of n blocks of inputs."""
    return jnp.moveaxis(shared.scale, 0, -1)
