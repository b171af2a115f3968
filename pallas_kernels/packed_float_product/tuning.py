"""Choices made for Hopper GPUs: sizes of the kernel's blocks.

Those of packed_expert_product, with fewer warpgroups where a CTA for each multiprocessor would be
missing: a single expert has few tiles. Not timed.
"""

from pallas_kernels.expert_product.tuning import OUTPUTS
from pallas_kernels.expert_slots import LEAST_LANES, MOST_LANES
from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.packed_expert_product.tuning import PackedExpertTuning
from pallas_kernels.shared_memory import LINE

MANY_LANES = 32  # whose sums take registers


def lanes_for(rows: int) -> int:
    """Lanes of a slot: the fewest that hold all rows, or the most that there are."""
    lanes = LEAST_LANES
    while lanes < min(rows, MOST_LANES):
        lanes *= 2
    return lanes


def packed_float_tuning(slots: int, lanes: int, width: int) -> PackedExpertTuning:
    """The variant for so many slots and lanes, and outputs."""
    tiles = width // OUTPUTS
    line = LINE if lanes < MANY_LANES else LINE // 2
    if slots * tiles < MULTIPROCESSORS:  # otherwise many would be idle
        return PackedExpertTuning(shares=2, ctas=2 if lanes == LEAST_LANES else 1, line=line)
    if lanes == LEAST_LANES:
        return PackedExpertTuning(ctas=3)
    most = 4 if lanes < MANY_LANES else 2
    fitting = [
        size
        for size in range(1, most + 1)
        if not tiles % size and slots * tiles // size >= MULTIPROCESSORS
    ]
    warpgroups = max(fitting)  # lanes are read once for all of their outputs
    shares = 1 if lanes < MANY_LANES else 3 - warpgroups
    return PackedExpertTuning(warpgroups=warpgroups, shares=shares, line=line)
