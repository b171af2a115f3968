"""Choices made for Hopper GPUs: sizes of the kernel's blocks.

Chosen by times on an H200, see docs/results/experts.md.
"""

import dataclasses

from pallas_kernels.expert_product.tuning import LEAST_LONG, OUTPUTS
from pallas_kernels.expert_slots import LEAST_LANES
from pallas_kernels.h100 import MULTIPROCESSORS
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


def packed_expert_tuning(
    slots: int, lanes: int, depth: int, width: int, bits: int
) -> PackedExpertTuning:
    """The variant for so many slots and lanes, inputs and outputs of an expert, and bits of a
    number."""
    tiles, unit = width // OUTPUTS, 128 if bits == 8 else 64
    if lanes == LEAST_LANES:
        if slots * tiles < MULTIPROCESSORS:  # otherwise many would be idle
            return PackedExpertTuning(shares=2, ctas=2, unit=unit)
        return PackedExpertTuning(ctas=3, unit=unit)
    if lanes < 32:  # lanes are read once for several tiles
        return PackedExpertTuning(warpgroups=_divisor(tiles, 4), unit=unit)
    if lanes >= 64 and bits == 8 and depth < LEAST_LONG:  # the next tile's blocks come meanwhile
        return PackedExpertTuning(tiles=4, ctas=2, unit=unit)
    # Sums of so many lanes take registers.
    warpgroups, line = _divisor(tiles, 2), LINE if bits == 8 else LINE // 2
    return PackedExpertTuning(warpgroups=warpgroups, shares=3 - warpgroups, line=line)


def _divisor(tiles: int, most: int) -> int:
    """The largest divisor up to ``most``."""
    return max(size for size in range(1, most + 1) if not tiles % size)
