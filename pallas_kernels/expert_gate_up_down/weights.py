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
      shared: of a shared expert that is stored in another way than these; it is the last one.
    """

    gate_up: PackedExperts
    down: PackedExperts
    shared: "ExpertWeights | None" = None

    @property
    def num_experts(self) -> int:
        """The shared one included."""
        return self.gate_up.num_experts + (0 if self.shared is None else self.shared.num_experts)
