"""What the nodes of a tree do to the states of a gated delta rule: from projections to inputs."""

import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels.delta_inputs.arguments import ConvolvedNodes, Strengths, Unprojected
from pallas_kernels.delta_inputs.reference import delta_inputs_reference, inputs_of, unit_length
from pallas_kernels.delta_rule.tokens import Tokens
from pallas_kernels.selection import Implementation, kernel_module

__all__ = [
    "ConvolvedNodes",
    "Strengths",
    "Unprojected",
    "delta_inputs",
    "inputs_of",
    "misfit",
    "projects",
    "unit_length",
]

KEY_DIM = 128  # of a head: a thread of a warpgroup has an entry
WIDTH_STEP = 256  # inputs of strengths and decays: two for each thread
MAX_NODES = 512  # of all trees: with more of them few launches save nothing


def delta_inputs(
    nodes: ConvolvedNodes,
    strengths: Strengths,
    k_dim: int,
    implementation: Implementation = "reference",
) -> tuple[Array, Tokens]:
    """Queries and tokens of the delta rule: the causal convolution of a tree's nodes, SiLU, queries
    and keys of length 1, decays and strengths.

    Args:
      nodes: the projected inputs of the convolution, and what they follow.
      strengths: the decays and strengths, projected or not. The kernel projects those of few nodes
        where that saves launches.
      k_dim: Dk, of a key head.
      implementation: see selection.Implementation; ``misfit`` says what the Hopper kernel takes.

    Returns float32 [B, N, G, Dk], queries over the root of Dk, and [B, N, ...], the tokens.
    """
    mosaic = kernel_module("delta_inputs", implementation, misfit(nodes, k_dim))
    if mosaic is None:
        return delta_inputs_reference(nodes, strengths.projected(), k_dim)
    if not projects(strengths):
        strengths = strengths.projected()
    return mosaic.delta_inputs_mosaic(nodes, strengths)


def projects(strengths: Strengths) -> bool:
    """Whether the kernel can project these strengths and decays, if they are of few nodes."""
    ba = strengths.ba
    if not isinstance(ba, Unprojected):
        return False
    return ba.x.dtype == ba.weight.dtype == jnp.bfloat16 and ba.x.shape[-1] % WIDTH_STEP == 0


def misfit(nodes: ConvolvedNodes, k_dim: int) -> str | None:
    """Why the kernel cannot take these projections, None if it can."""
    values = nodes.taps.shape[-1] - 2 * k_dim
    if k_dim != KEY_DIM or values % KEY_DIM:
        return f"keys of {k_dim} and {values} values of a key head: {KEY_DIM}, and a multiple of it"
    if nodes.qkvz.dtype != nodes.before.dtype:
        return f"{nodes.qkvz.dtype} inputs after {nodes.before.dtype} ones: they must be the same"
    if (count := math.prod(nodes.places.shape[:2])) > MAX_NODES:
        return f"{count} nodes: at most {MAX_NODES}"
    return None
