"""Sizes of the Hopper kernel's blocks, and how its products are split."""

import dataclasses

from pallas_kernels.policy import MULTIPROCESSORS

OUTPUTS = 64  # of a warpgroup: what the tensor cores take
MAX_SPLITS = 8
SCALED_ROWS = 32  # scales of so many rows are copied at once: 128 bytes


@dataclasses.dataclass(frozen=True)
class PackedTuning:
    """One variant of the kernel.

    Attributes:
      warpgroups: that multiply; each has 64 outputs.
      stages: blocks in shared memory.
      registers, producer_registers: of each thread that multiplies, and of those that copy;
        registers 0: the compiler's choice.
    """

    warpgroups: int = 2
    stages: int = 6
    registers: int = 0
    producer_registers: int = 40


def packed_tuning(rows: int, depth: int, width: int) -> PackedTuning:
    """The variant for x [rows, depth] and weights [width, depth]."""
    return PackedTuning()


def choose_packed_splits(depth: int, width: int, group: int) -> int:
    """Parts of the inputs that are summed separately, so that all multiprocessors have work."""
    tiles, splits = width // (2 * OUTPUTS), 1
    while splits < MAX_SPLITS and 2 * splits * tiles <= 2 * MULTIPROCESSORS:
        if depth % (2 * splits * min(group, 128)):
            break
        splits *= 2
    return splits
