"""The weights that choose experts, and those of the experts, as the kernel reads them."""

from typing import NamedTuple

from jax import Array

from pallas_kernels.packed_experts import PackedExperts


class Router(NamedTuple):
    """What rows choose experts by.

    Attributes:
      weight: bfloat16 [E, H], for each expert but the shared one.
      gate: bfloat16 [H], of the shared expert, whose weight is the sigmoid of its product. None: it
        counts 1.
    """

    weight: Array
    gate: Array | None = None


class ExpertWeights(NamedTuple):
    """Those of all experts.

    Attributes:
      gate_up: two parts of F outputs.
      down: one part of H outputs.
    """

    gate_up: PackedExperts
    down: PackedExperts
