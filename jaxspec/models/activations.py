"""What MLPs make of gate and up, in jnp operations, and in the words of kernels."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.experts import BoundedSwiglu, ClampedSwiglu, LimitedSwiglu, SquaredRelu
from jaxspec.config.mlps import Activation
from pallas_kernels.activations import Bound, Clamp, Gating, Gelu, Limit, units_of


@jax.named_scope("activation")
def gated(gate_up: Array, activation: Activation) -> Array:
    """[..., 2, F] -> [..., F]; without a gate [..., 1, F] -> [..., F]"""
    if isinstance(activation, SquaredRelu):
        return jnp.square(jax.nn.relu(gate_up[..., 0, :]))
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    if not isinstance(activation, str):
        return units_of(gate, up, clamp_of(activation), jax.nn.sigmoid)
    function = jax.nn.silu if activation == "silu" else jax.nn.gelu
    return function(gate) * up


def clamp_of(
    activation: ClampedSwiglu | LimitedSwiglu | BoundedSwiglu | Literal["gelu_tanh"],
) -> Gating:
    """An activation in the words of kernels."""
    match activation:
        case "gelu_tanh":
            return Gelu()
        case ClampedSwiglu(alpha, limit):
            return Clamp(alpha, limit)
        case LimitedSwiglu(limit):
            return Limit(limit)
        case BoundedSwiglu(limit):
            return Bound(limit)
