"""From a gated delta rule's projections to what tokens do to its state."""

from jax import Array

from jaxspec.cache.convolution import tree_places
from jaxspec.cache.delta_rule import DeltaInputs
from jaxspec.cache.recurrent import DeltaState
from pallas_kernels.delta_inputs import (
    ConvolvedNodes,
    Strengths,
    Unprojected,
    delta_inputs,
    inputs_of,
    unit_length,
)
from pallas_kernels.selection import Kernels

__all__ = ["Strengths", "Unprojected", "projected_inputs", "unit_length"]


def projected_inputs(
    state: DeltaState,
    qkvz: Array,
    strengths: Strengths,
    taps: Array,
    k_dim: int,
    rows: Array,
    tree: tuple[Array, Array] | None,
    kernels: Kernels,
) -> tuple[Array, DeltaInputs]:
    """Queries float32 [B, T, G, Dk] and the inputs of a pass's tokens, after the causal
    convolution. The nodes of trees have a kernel.

    Args:
      state: of all rows, with the inputs of the convolution before the pass.
      qkvz: [B, T, G, c or more], projected, the c channels of the convolution first.
      strengths: the strengths and decays, projected or not.
      taps: [K, G, c], weights of the convolution.
      k_dim: Dk, of a key head.
      rows: [B], each sequence's of the state.
      tree: ancestors and depths of a tree's nodes, see convolution.tree_places; None: a run.
    """
    if tree is None:
        channels = qkvz[..., : taps.shape[-1]]
        convolved = state.convolved(rows, channels, taps, None, None)
        q, tokens = inputs_of(convolved, strengths.projected(), k_dim)
    else:
        places = tree_places(*tree, state.channels.shape[1])
        nodes = ConvolvedNodes(qkvz, state.channels, rows, places, taps)
        how = k_dim, kernels.implementation("delta_inputs")
        q, tokens = delta_inputs(nodes, strengths, *how)
    return q, DeltaInputs(**tokens._asdict())
