"""Sizes of a product with weights of 4 or 8 bits, and of the ring that its blocks go through."""

import dataclasses
import math

from pallas_kernels.packed_product.tuning import (
    LARGEST_STEP,
    OUTPUTS,
    PackedTuning,
    scaled_rows,
    scales_weights,
)
from pallas_kernels.ring import ring_stages
from pallas_kernels.shared_memory import LINE

MOST_COPIED = 256  # entries of a dimension that the copy engine takes at once


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """Sizes of a product: x [rows, depth] times weights [width, depth]."""

    rows: int  # of x and the result
    depth: int
    width: int
    group: int  # inputs that share a scale
    weight_bits: int  # 4: integers; 8: floats
    x_bits: int  # 16, or 8: floats with scales
    scales: tuple[str, ...]  # those of SCALES that are given
    num_splits: int
    config: PackedTuning
    interpret: bool

    @property
    def by_step(self) -> tuple[str, ...]:
        """Those of ``scales`` that go through the ring. With weights of 4 bits x has one scale a
        row, which multiplies at the end."""
        return tuple(name for name in self.scales if name != "x_scale" or not self.widens_to_float8)

    @property
    def tile(self) -> int:
        """Outputs of a CTA."""
        return self.config.tile

    @property
    def row_parts(self) -> int:
        """CTAs that share the rows of the same outputs."""
        return self.config.row_parts(self.rows)

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA, padded to a multiple of 8."""
        return -(-self.rows // (8 * self.row_parts)) * 8

    @property
    def padded_rows(self) -> int:
        """The number of all CTAs."""
        return self.row_parts * self.tile_rows

    @property
    def block(self) -> int:
        """Inputs of a block: whole lines of weights where the inputs of a CTA are so many. It is a
        part of a group or some whole ones."""
        line = LINE if self.weight_bits == 8 else self.config.block
        block = math.gcd(line, self.depth // self.num_splits)
        divides = not (block % self.group and self.group % block)
        return block if divides else math.gcd(block, self.group)

    @property
    def blocks(self) -> int:
        """Blocks of a CTA."""
        return self.depth // self.num_splits // self.block

    @property
    def scales_weights(self) -> bool:
        """Whether weights are scaled, instead of sums."""
        return scales_weights(self.rows, self.x_bits)

    @property
    def widens_to_float8(self) -> bool:
        return self.weight_bits == 4 and self.x_bits == 8

    @property
    def step(self) -> int:
        """Inputs that are summed before the sums are scaled."""
        return min(self.group, LARGEST_STEP)

    @property
    def unit(self) -> int:
        """Inputs of a product of the tensor cores."""
        return self.step if self.weight_bits == 8 else min(self.config.unit, self.step)

    @property
    def block_groups(self) -> int:
        return max(1, self.block // self.group)

    @property
    def stages(self) -> int:
        """Blocks in the ring."""
        weights = self.tile * self.block * self.weight_bits // 8
        x = self.tile_rows * self.block * self.x_bits // 8
        scaled = self.tile + ("x_scale" in self.by_step) * scaled_rows(self.rows)
        stage = weights + x + 4 * self.block_groups * scaled
        results, config = 4 * self.tile_rows * self.tile, self.config
        return ring_stages(config.ctas, stage, results, config.most_stages)

    @property
    def part(self) -> int:
        """Outputs whose scales are copied at once."""
        return max(
            size for size in range(OUTPUTS, MOST_COPIED + 1, OUTPUTS) if not self.tile % size
        )

    @property
    def copies(self) -> int:
        """Copies of a block: x, weights, and ``by_step``."""
        by_output = 1 + ("zero" in self.by_step)
        return 2 + by_output * (self.tile // self.part) + ("x_scale" in self.by_step)
