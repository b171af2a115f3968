"""Inputs of a gated delta rule in jnp operations, for trees and runs alike."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_inputs.arguments import ConvolvedNodes, Strengths, Unprojected
from pallas_kernels.delta_rule.tokens import Tokens

NORM_EPS = 1e-6  # of queries and keys, in all families


def delta_inputs_reference(
    nodes: ConvolvedNodes, strengths: Strengths, k_dim: int
) -> tuple[Array, Tokens]:
    """See pallas_kernels.delta_inputs.delta_inputs."""
    width, past = nodes.taps.shape[-1], nodes.before.shape[1]
    channels = nodes.qkvz[..., :width]
    every = jnp.concatenate([nodes.before[nodes.rows], channels], axis=1)
    batch = jnp.arange(len(nodes.rows))[:, None]
    taps = [every[batch, nodes.places[:, :, tap]] for tap in range(past)]
    weights = nodes.taps.astype(jnp.float32)
    convolved = jnp.zeros(channels.shape, jnp.float32)
    for weight, tap in zip(weights, [*taps, channels], strict=True):
        convolved = convolved + tap.astype(jnp.float32) * weight
    return inputs_of(convolved, strengths, k_dim)


def inputs_of(convolved: Array, strengths: Strengths, k_dim: int) -> tuple[Array, Tokens]:
    """Queries and tokens of float32 convolved channels [B, T, G, c]: see delta_inputs."""
    channels, values = jax.nn.silu(convolved), strengths.bias.shape[-1]
    q, k, v = jnp.split(channels, [k_dim, 2 * k_dim], axis=-1)
    assert not isinstance(strengths.ba, Unprojected), "see Strengths.projected"
    b, a = jnp.split(strengths.ba.astype(jnp.float32), 2, axis=-1)
    tokens = Tokens(
        k=unit_length(k),
        v=v.reshape(*v.shape[:-1], values, -1),
        g=-jnp.exp(strengths.a_log) * jax.nn.softplus(a + strengths.bias),
        beta=jax.nn.sigmoid(b),
    )
    return unit_length(q) / k_dim**0.5, tokens


def unit_length(x: Array) -> Array:
    """x [..., Dk] of length 1."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)
