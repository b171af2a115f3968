"""Sizes of the products of slots with experts, and of the ring that their blocks go through."""

import dataclasses
import math
from typing import Any

from pallas_kernels.activations import Gating
from pallas_kernels.expert_product.tuning import ExpertTuning
from pallas_kernels.ring import ring_stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """Sizes of the products of slots with experts, whatever their weights are stored as."""

    num_experts: int
    slots: int
    lanes: int
    shared: bool  # whether all slots have the same lanes
    depth: int
    parts: int  # 2: gate and up
    width: int
    clamp: Gating | None
    dtype: Any  # of results
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlan(SlotPlan):
    """Sizes of the products of slots with experts [depth, parts, width]."""

    config: ExpertTuning

    @property
    def block(self) -> int:
        return math.gcd(self.config.block, self.depth)

    @property
    def blocks(self) -> int:
        return self.depth // self.block

    @property
    def stages(self) -> int:
        """Blocks in the ring."""
        config = self.config
        stage = 2 * self.block * (self.parts * config.tile + self.lanes)
        results = self.dtype.itemsize * self.lanes * config.tile
        return min(self.blocks, ring_stages(config.ctas, stage, results, config.most_stages))
