"""Sizes of a product with experts of 4 or 8 bits, and of the ring that its blocks go through."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.expert_product.plan import SlotPlan
from pallas_kernels.four_bits import ScaleCode
from pallas_kernels.packed_expert_product.tuning import PackedExpertTuning
from pallas_kernels.packed_experts import Code
from pallas_kernels.ring import ring_stages

MOST_BYTES = 160  # of an output's weights in a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedExpertPlan(SlotPlan):
    """Sizes of the products of slots with experts of ``parts`` [width, depth]."""

    code: Code
    scaled: tuple[int, int]  # outputs and inputs that share a scale
    scale_dtype: Any
    scale_code: ScaleCode
    has_zeros: bool  # of groups
    config: PackedExpertTuning

    @property
    def bits(self) -> int:
        return 8 if self.code == "e4m3" else 4

    @property
    def line(self) -> int:
        """Bytes of a row of a tile in shared memory."""
        return math.gcd(self.config.line, self._bytes)

    @property
    def row(self) -> int:
        """Bytes of an output's weights in a block: lines, several where these are short."""
        lines = self._bytes // self.line
        most = max(1, MOST_BYTES // self.line) if self.line < self.config.line else 1
        return self.line * max(size for size in range(1, most + 1) if not lines % size)

    @property
    def _bytes(self) -> int:
        """The bytes of an output's weights."""
        return self.depth * self.bits // 8

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return self.row * 8 // self.bits

    @property
    def blocks(self) -> int:
        return self.depth // self.block

    @property
    def shares(self) -> int:
        """Warpgroups that share the blocks of the same outputs."""
        return max(n for n in range(1, self.config.shares + 1) if not self.blocks % n)

    @property
    def tiles(self) -> int:
        """Tiles of outputs that a CTA computes, one after the other."""
        tiles = self.width // self.config.tile
        most = 1 if self.shares > 1 else self.config.tiles
        return max(n for n in range(1, most + 1) if not tiles % n)

    @property
    def groups(self) -> int:
        """Groups of a block that have scales in the ring; 0 where blocks of outputs have them."""
        return 0 if self.scaled[0] > 1 else max(1, self.block // self.scaled[1])

    @property
    def scales_weights(self) -> bool:
        """Whether scales multiply weights, as bytes do, and not sums."""
        return self.scale_dtype == jnp.uint8

    @property
    def step(self) -> int:
        """Inputs that are summed before the sums are scaled, if they are."""
        return self.block if self.scales_weights else min(self.block, self.scaled[1])

    @property
    def unit(self) -> int:
        """Inputs of a product of the tensor cores."""
        return min(self.config.unit, self.step)

    @property
    def stages(self) -> int:
        """Blocks in the ring."""
        config = self.config
        scales = self.groups * (self.scale_dtype.itemsize + 2 * self.has_zeros)
        stage = self.parts * config.tile * (self.row + scales) + 2 * self.lanes * self.block
        results = self.dtype.itemsize * self.lanes * config.tile
        results += 4 * self.lanes * config.tile * self.parts * (self.shares - 1)
        fitting = ring_stages(config.ctas, stage, results, config.most_stages)
        # A warpgroup always takes the same ones.
        return min(self.tiles * self.blocks, fitting // self.shares * self.shares)
