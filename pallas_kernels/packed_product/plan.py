"""Sizes of a product with weights of 4 or 8 bits, and of the ring that its blocks go through."""

import dataclasses
import math

from pallas_kernels.packed_product.tuning import (
    LARGEST_STEP,
    OUTPUTS,
    SUMMED_ROWS,
    PackedTuning,
    scaled_rows,
)
from pallas_kernels.shared_memory import LINE

MOST_COPIED = 256  # entries of a dimension that the copy engine takes at once


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a product: x [rows, depth] times weights [width, depth]."""

    rows: int  # of x and the result
    padded_rows: int  # of the tensor cores' operand
    depth: int
    width: int
    group: int  # inputs that share a scale
    more: tuple[str, ...]  # by group, beside the weights' scales: zero, x_scale
    num_splits: int
    config: PackedTuning
    interpret: bool

    @property
    def tile(self) -> int:
        """Outputs of a CTA."""
        return self.config.tile

    @property
    def block(self) -> int:
        """Inputs of a block: whole lines of weights where the inputs of a CTA are so many."""
        line = LINE if self.is_float8 else self.config.block
        return math.gcd(line, self.depth // self.num_splits)

    @property
    def blocks(self) -> int:
        """Blocks of a CTA."""
        return self.depth // self.num_splits // self.block

    @property
    def scales_weights(self) -> bool:
        """Whether weights are scaled, instead of sums."""
        return self.rows > SUMMED_ROWS

    @property
    def step(self) -> int:
        """Inputs that are summed before the sums are scaled."""
        return min(self.group, LARGEST_STEP)

    @property
    def unit(self) -> int:
        """Inputs of a product of the tensor cores."""
        return self.step if self.is_float8 else min(self.config.unit, self.step)

    @property
    def block_groups(self) -> int:
        return max(1, self.block // self.group)

    @property
    def stages(self) -> int:
        """Blocks in the ring."""
        entry = 2 - self.is_float8  # bytes of an entry of x: four times those of a weight, or once
        weights = self.tile * self.block * entry // (1 if self.is_float8 else 4)
        scales = 4 * self.block_groups * (self.tile + self.is_float8 * self.scaled_rows)
        stage = weights + entry * self.padded_rows * self.block + scales
        return self.config.stages(stage, 4 * self.padded_rows * self.tile)

    @property
    def part(self) -> int:
        """Outputs whose scales are copied at once."""
        return max(
            size for size in range(OUTPUTS, MOST_COPIED + 1, OUTPUTS) if not self.tile % size
        )

    @property
    def copies(self) -> int:
        """Copies of a block: x, weights, scales, and ``more``."""
        by_output = 1 + ("zero" in self.more)
        return 2 + by_output * (self.tile // self.part) + self.is_float8

    @property
    def is_float8(self) -> bool:
        return "x_scale" in self.more

    @property
    def scaled_rows(self) -> int:
        """Rows of x that have a scale, padding included."""
        return scaled_rows(self.rows)
