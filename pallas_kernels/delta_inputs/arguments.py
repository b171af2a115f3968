"""Projections of tree nodes before a gated delta rule, and the weights that make inputs of them."""

from typing import NamedTuple

from jax import Array


class ConvolvedNodes(NamedTuple):
    """Inputs of the convolution, of B trees of N nodes, and what they follow.

    G key heads have c = 2 Dk + r Dv channels each: query, key, values.

    Attributes:
      qkvz: [B, N, G, c or more]; what is after the channels is not read.
      before: [R, K - 1, G, c], the last inputs of R rows, the oldest first.
      rows: int32 [B], each tree's entry of ``before``.
      places: int32 [B, N, K - 1], the tokens before each node, the oldest first: below K - 1 one of
        ``before``, else K - 1 more than a node.
      taps: [K, G, c], the node's own last.
    """

    qkvz: Array
    before: Array
    rows: Array
    places: Array
    taps: Array


class Strengths(NamedTuple):
    """Decays and strengths of r value heads for each key head, before they are one.

    Attributes:
      ba: [B, N, G, 2 r]: strengths, then decays.
      bias: float32 [G, r], of the decays.
      a_log: float32 [G, r], logs of the decays' rates.
    """

    ba: Array
    bias: Array
    a_log: Array
