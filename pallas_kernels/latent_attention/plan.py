"""Sizes of a call of the latent attention kernel, and the part of it that a CTA does."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels import kernel_axes
from pallas_kernels.latent_attention.tuning import LatentTuning
from pallas_kernels.paged_attention.tuning import ROWS


@dataclasses.dataclass(frozen=True)
class LatentPlan:
    """Sizes of a call. A tile is 64 consecutive of the rows of a sequence: T tokens' Q heads.

    Rows are copied ``unit`` at a time, so that a copy is within a sequence or outside.
    """

    batch: int
    num_tokens: int
    heads: int
    stored: int  # entries of a vector
    latent: int  # of which so many are the value
    page_size: int
    columns: int  # of the page table
    words: int  # of the ancestor mask
    causal: bool  # no mask: a token sees the tokens before it
    first_slot: int
    scale: float  # of the scores
    config: LatentTuning
    interpret: bool

    @property
    def rows(self) -> int:
        return self.num_tokens * self.heads

    @property
    def tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def unit(self) -> int:
        return math.gcd(self.rows, ROWS)

    @property
    def half(self) -> int:
        """Columns of the output that a warpgroup has."""
        return self.latent // 2

    @property
    def pages_of_block(self) -> int:
        """Pages that a block of context slots lies in."""
        return max(self.config.block // self.page_size, 1)


class Work:
    """The range of context blocks that this CTA attends to: [start, stop).

    Attributes:
      context: number of committed slots.
      end: end of the sequence's slots: no row sees one from there on.
      committed: every row sees the slots before it, from the first slot on.
    """

    def __init__(self, plan: LatentPlan, context_lens: Any, kv_lens: Any) -> None:
        self.plan, block = plan, plan.config.block
        self.tile, self.split, self.sequence = (
            kernel_axes.index(name) for name in ("tile", "split", "sequence")
        )
        self.context = self.committed = context_lens[self.sequence]
        self.end = end = jnp.minimum(kv_lens[self.sequence], plan.columns * plan.page_size)
        if plan.causal:
            first, last = ((self.tile * ROWS + row) // plan.heads for row in (0, ROWS - 1))
            self.committed += first
            end = jnp.minimum(end, self.context + jnp.minimum(last, plan.num_tokens - 1) + 1)
        self.committed = jnp.minimum(self.committed, self.end)
        first_block = plan.first_slot // block
        num_blocks = jnp.maximum((end + block - 1) // block - first_block, 0)
        share = (num_blocks + plan.config.splits - 1) // plan.config.splits
        last = first_block + num_blocks
        self.start = jnp.minimum(first_block + self.split * share, last)
        self.stop = jnp.minimum(self.start + share, last)

    def is_edge(self, block: Array) -> Array:
        """Whether a block holds slots that no query sees and that may be NaN."""
        size = self.plan.config.block
        return ((block + 1) * size > self.end) | self._is_first(block)

    def all_see(self, block: Array) -> Array:
        """Whether every row sees all slots of a block."""
        size = self.plan.config.block
        return ((block + 1) * size <= self.committed) & ~self._is_first(block)

    def _is_first(self, block: Array) -> Array:
        """Whether a block starts before the first slot."""
        return block * self.plan.config.block < self.plan.first_slot
