"""Choices made for Hopper GPUs: sizes of the kernel's blocks."""

import dataclasses

from pallas_kernels.expert_product.tuning import OUTPUTS
from pallas_kernels.shared_memory import LINE

MOST_STAGES = 16


@dataclasses.dataclass(frozen=True)
class PackedExpertTuning:
    """One variant of the kernel.

    Attributes:
      warpgroups: with 64 outputs each.
      shares: most warpgroups that share the inputs of the same outputs.
      tiles: most tiles of outputs that a CTA computes, one after the other; 1 if warpgroups share.
      unit: inputs whose weights a warpgroup has in registers at once: 32, 64 or 128.
      ctas: that share a multiprocessor and its memory.
      most_stages: most blocks of a CTA in shared memory.
      line: most bytes of an output's weights in a block: 32, 64 or 128.
    """

    warpgroups: int = 1
    shares: int = 1
    tiles: int = 1
    unit: int = 64
    ctas: int = 1
    most_stages: int = MOST_STAGES
    line: int = LINE

    @property
    def tile(self) -> int:
        """Outputs of a CTA."""
        return OUTPUTS * self.warpgroups


def packed_expert_tuning(lanes: int, depth: int, width: int) -> PackedExpertTuning:
    """The variant for slots of so many lanes, and so many inputs and outputs of an expert."""
    if lanes < 32:
        return PackedExpertTuning()
    # Sums of so many lanes take registers. Lanes are read once for 128 outputs.
    pairs_up = width % (2 * OUTPUTS) == 0
    return PackedExpertTuning(warpgroups=2 if pairs_up else 1, shares=1 if pairs_up else 2)
