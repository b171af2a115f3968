"""Projections of tree nodes before a gated delta rule, and the weights that make inputs of them."""

from typing import NamedTuple, Self

from jax import Array

from pallas_kernels.products import einsum_f32


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


class Unprojected(NamedTuple):
    """Strengths and decays before their projection, which has few outputs.

    Attributes:
      x: [B, N, H], its inputs.
      weight: [G, 2 r, H].
    """

    x: Array
    weight: Array

    def projected(self) -> Array:
        """[B, N, G, 2 r], in the dtype of x."""
        return einsum_f32("bnh,gsh->bngs", self.x, self.weight).astype(self.x.dtype)


class Strengths(NamedTuple):
    """Decays and strengths of r value heads for each key head, before they are one.

    Attributes:
      ba: [B, N, G, 2 r]: strengths, then decays. Or what they are projected from.
      bias: float32 [G, r], of the decays.
      a_log: float32 [G, r], logs of the decays' rates.
    """

    ba: Array | Unprojected
    bias: Array
    a_log: Array

    def projected(self) -> Self:
        """With ``ba`` as an array."""
        return self._replace(ba=self.ba.projected()) if isinstance(self.ba, Unprojected) else self
