"""The few functions that transformer blocks are made of."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config import Llama3RopeScaling, ModelConfig
from pallas_kernels.add_rms_norm import add_rms_norm as fused_add_rms_norm
from pallas_kernels.add_rms_norm.reference import rms_norm as rms_norm_reference


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., H] times weight [H, ...]; the weight's other dimensions become the output's."""
    y = jnp.tensordot(x, weight, axes=1)
    return y if bias is None else y + bias


@jax.named_scope("norm")
def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Root-mean-square norm over the last dimension, in float32. No weight: identity."""
    return x if weight is None else rms_norm_reference(x, weight, eps)


@jax.named_scope("norm")
def add_rms_norm(x: Array, y: Array, weight: Array | None, eps: float) -> tuple[Array, Array]:
    """x + y, and its norm. No weight: the sum itself."""
    if weight is None:
        return x + y, x + y
    return fused_add_rms_norm(x, y, weight, eps)


@jax.named_scope("activation")
def swiglu(gate_up: Array) -> Array:
    """[..., 2, F] -> [..., F]"""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def rope_frequencies(config: ModelConfig) -> Array:
    """Radians a position, float32 [D / 2], with Llama 3's scaling where the config has it."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    return frequencies if scaling is None else _scale_llama3(frequencies, scaling)


def _scale_llama3(frequencies: Array, scaling: Llama3RopeScaling) -> Array:
    """Slow rotations are divided by ``factor``, fast ones kept, those between interpolated."""
    rotations = scaling.original_max_position * frequencies / (2 * jnp.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = jnp.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


@jax.named_scope("rope")
def rope_angles(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin of each position's rotations: int [B, T] -> float32 [B, T, 2, D / 2] twice.

    The two rows are for a head's two halves: the sine's first row is negated.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


@jax.named_scope("rope")
def apply_rope(x: Array, rope: tuple[Array, Array]) -> Array:
    """Rotate heads x [B, T, G, R, D] (halves paired, as in the Llama checkpoints).

    The halves are exchanged by a reversal, which XLA fuses into what follows; a concatenation
    would be a kernel of its own in every layer.
    """
    cos, sin = (a[:, :, None, None] for a in rope)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    rotated = halves * cos + jnp.flip(halves, axis=-2) * sin
    return rotated.reshape(x.shape).astype(x.dtype)
