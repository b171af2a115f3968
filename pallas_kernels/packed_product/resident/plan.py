"""Sizes of one call of resident_product."""

import dataclasses
from typing import Any

from pallas_kernels.packed_product.resident.tuning import (
    BARRIER_BYTES,
    SHARED_BYTES,
    TILE,
    ProductTuning,
    groups_of,
    padded_rows,
)

SLOTS = 2  # items whose scales are in shared memory


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a call."""

    rows: int
    depth: int
    width: int
    num_groups: int  # groups of inputs that share a scale
    zeros: bool
    splits: int
    scale_dtype: Any
    config: ProductTuning
    interpret: bool

    @property
    def by_group(self) -> tuple[str, ...]:
        """What is copied for each group of an output."""
        return ("scales", "zeros") if self.zeros else ("scales",)

    @property
    def padded(self) -> int:
        return padded_rows(self.rows)

    @property
    def split_depth(self) -> int:
        return self.depth // self.splits

    @property
    def blocks(self) -> int:
        """Blocks of an item."""
        return self.split_depth // self.config.block

    @property
    def group(self) -> int:
        return self.depth // self.num_groups

    @property
    def step(self) -> int:
        """Inputs that are summed before the sum is scaled: a group, or its part in a block."""
        return min(self.group, self.config.block)

    @property
    def unit(self) -> int:
        """Inputs of one call of wgmma: a swizzled line of x holds so many."""
        return min(self.step, 64)

    @property
    def share(self) -> int:
        """CTAs that share the items of a split."""
        return groups_of(self.splits, self.width)

    @property
    def tiles(self) -> int:
        return self.width // TILE

    @property
    def scales(self) -> int:
        """Scales of an output that are copied for an item."""
        return -(-self.split_depth // self.group)

    @property
    def other_bytes(self) -> int:
        """Shared memory but for weights."""
        scales = len(self.by_group) * SLOTS * TILE * self.scales * 2
        sums = self.config.consumers * TILE * self.padded * 4  # one of them to be stored
        return 2 * self.padded * self.split_depth + scales + sums + BARRIER_BYTES

    @property
    def stages(self) -> int:
        """Blocks of weights in flight."""
        room = max(SHARED_BYTES - self.other_bytes, 0) // self.config.stage_bytes
        stages = min(room, self.config.most_stages)
        return stages // self.config.consumers * self.config.consumers

    def check(self) -> None:
        """Raises ValueError for a tuning that does not suit the call."""
        if self.split_depth % self.config.block:
            raise ValueError(f"splits of {self.split_depth} in blocks of {self.config.block}")
        if not self.stages:
            raise ValueError(f"{self.other_bytes} bytes of shared memory leave none to weights")
