"""The few functions that transformer blocks are made of."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config import Llama3RopeScaling, ModelConfig
from pallas_kernels.add_rms_norm import add_rms_norm as fused_add_rms_norm
from pallas_kernels.add_rms_norm.reference import rms_norm as rms_norm_reference
from pallas_kernels.products import product_parts, sum_parts
from pallas_kernels.rope_kv_write.reference import rotated_heads
from pallas_kernels.tuning import parts_of_product


@dataclasses.dataclass(frozen=True)
class Heads:
    """What attention starts from: a projection's heads, still to be normed and rotated.

    Attributes:
      parts: [S, B, T, G, R, D], a product's: of each KV head its queries, then its key, then its
        value. Rows past B are padding.
      dtype: of the heads themselves.
      rope: as ``rope_angles`` makes it.
      q_norm, k_norm: [D] weights, or None.
      eps: of the norms.
    """

    parts: Array
    dtype: jnp.dtype
    rope: Array
    q_norm: Array | None
    k_norm: Array | None
    eps: float

    def rotated(self) -> tuple[Array, Array, Array]:
        """Queries [B, T, Q, D], keys and values [B, T, G, D]."""
        qkv = sum_parts(self.parts, len(self.rope), self.dtype)
        return rotated_heads(qkv, self.rope, self.q_norm, self.k_norm, self.eps)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., H] times weight [H, ...]; the weight's other dimensions become the output's."""
    y = jnp.tensordot(x, weight, axes=1)
    return y if bias is None else y + bias


def linear_parts(
    x: Array, weight: Array, bias: Array | None, consumer: str, *, consumer_fits: bool
) -> Array:
    """``linear`` for an operation that adds up parts: [S, B, ..., N...].

    One part in x's dtype; or some in float32 where the consumer's kernel takes these arrays, as
    ``consumer_fits`` says but for their dtype, and the product is too narrow to fill the device.
    """
    num_parts = 1
    if consumer_fits and bias is None and x.dtype == jnp.bfloat16:
        depth = len(weight)
        num_parts = parts_of_product(consumer, x.size // depth, depth, weight.size // depth)
    if num_parts == 1:
        return linear(x, weight, bias)[None]
    return product_parts(x, weight, num_parts)


@jax.named_scope("norm")
def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Root-mean-square norm over the last dimension, in float32. No weight: identity."""
    return x if weight is None else rms_norm_reference(x, weight, eps)


@jax.named_scope("norm")
def add_rms_norm(x: Array, parts: Array, weight: Array | None, eps: float) -> tuple[Array, Array]:
    """x plus a product's parts [S, ..., H], and its norm. No weight: the sum itself."""
    if weight is None:
        total = x + sum_parts(parts, len(x), x.dtype)
        return total, total
    return fused_add_rms_norm(x, parts, weight, eps)


@jax.named_scope("activation")
def swiglu(gate_up: Array) -> Array:
    """[..., 2, F] -> [..., F]"""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, float32 [D / 2], with Llama 3's scaling where the config has it."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(config.rope_theta) ** -exponents
    scaling = config.rope_scaling
    return frequencies if scaling is None else _scale_llama3(frequencies, scaling)


def _scale_llama3(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Slow rotations are divided by ``factor``, fast ones kept, those between interpolated."""
    rotations = np.float32(scaling.original_max_position / (2 * math.pi)) * frequencies
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - np.float32(scaling.low_freq_factor)) / np.float32(span), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / np.float32(scaling.factor))


@jax.named_scope("rope")
def rope_angles(config: ModelConfig, positions: Array) -> Array:
    """Cosines, then sines, of each position's rotations: int [B, T] -> float32 [B, T, 2, 2, D / 2].

    The rows of each are for a head's two halves: the sine's first row is negated. One array, which
    XLA makes in one kernel; each step of drafting makes it anew.
    """
    angles = positions[..., None, None, None].astype(jnp.float32) * rope_frequencies(config)
    is_cosine = np.array([True, False])[:, None, None]
    sign = np.array([-1.0, 1.0], np.float32)[:, None]
    return jnp.where(is_cosine, jnp.cos(angles), jnp.sin(angles) * sign)
