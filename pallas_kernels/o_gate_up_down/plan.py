"""Sizes of a launch of o_gate_up_down, and which part of each product a thread block computes.

The three products are *phases* of the launch. The outputs of a phase are divided into *jobs* of two
tiles, and a thread block has whole sums of its jobs. A job of gate and up has a tile of each, of
the same units.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.h100 import MULTIPROCESSORS

ROWS = 8  # of x, padding included: what a product of the tensor cores takes
TILE = 16  # outputs, likewise
TILES = 2  # of a job
GROUP = 128  # inputs that share a scale
WARPS = 4  # of a warpgroup; each has one group of a block
BLOCK = WARPS * GROUP  # inputs
MOST_INPUTS = 4096  # of a thread block in a phase, of which it keeps x in shared memory
MOST_SPLITS = 8  # of down: each adds partial sums
BUFFERS = 2  # jobs whose parts are in shared memory

PhaseName = Literal["o", "gate_up", "down"]
PHASES: tuple[PhaseName, ...] = ("o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One variant of the kernel.

    Attributes:
      warpgroups: that multiply, each a block of a job in turn.
      stages: blocks of a warpgroup in shared memory.
      blocks: thread blocks of the launch, one on each multiprocessor. On a GPU with fewer of those
        they would wait for each other for ever.
    """

    warpgroups: int = 4
    stages: int = 2
    blocks: int = MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class Phase:
    """One of the products.

    Attributes:
      depth: inputs of a thread block.
      jobs: in which the outputs are divided.
      splits: parts of the inputs; a thread block has one.
    """

    name: PhaseName
    depth: int
    jobs: int
    splits: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of a job."""
        return self.depth // BLOCK


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a launch; ``names``: its phases."""

    rows: int
    inputs: int  # of o
    hidden: int
    units: int
    num_splits: int  # of down
    eps: float
    tuning: Tuning
    form: Any  # formats.Format
    names: tuple[PhaseName, ...]
    interpret: bool

    @property
    def phases(self) -> tuple[Phase, ...]:
        down = self.units // self.num_splits, self.hidden // (TILES * TILE), self.num_splits
        phases = (
            Phase("o", self.inputs, self.hidden // (TILES * TILE)),
            Phase("gate_up", self.hidden, self.units // TILE),
            Phase("down", *down),
        )
        return tuple(phase for phase in phases if phase.name in self.names)

    @property
    def depth(self) -> int:
        """The most inputs of a phase."""
        return max((phase.depth for phase in self.phases), default=BLOCK)

    @property
    def stages(self) -> int:
        """Blocks in the ring."""
        return self.tuning.warpgroups * self.tuning.stages

    def slot(self, number: Array) -> Array:
        """The place in the ring of a block of weights. Unsigned, a remainder is cheap."""
        place = lax.rem(number.astype(jnp.uint32), jnp.uint32(self.stages))
        return place.astype(jnp.int32)

    @property
    def meetings(self) -> int:
        """Barriers of all thread blocks, between two phases each."""
        return len(self.phases) - 1

    @property
    def turns(self) -> int:
        """Rows that a warpgroup norms."""
        return -(-self.rows // self.tuning.warpgroups)

    def split(self, phase: Phase) -> Array:
        """The part of the inputs that this thread block has."""
        return lax.rem(kernel_axes.index("block"), phase.splits)

    def own_jobs(self, phase: Phase) -> tuple[Array, Array]:
        """The first of this thread block's jobs, and their number."""
        sharing = self.tuning.blocks // phase.splits
        place = lax.div(kernel_axes.index("block"), phase.splits)  # the last ones may have none
        first, end = (
            lax.min(lax.div(at * phase.jobs, sharing), phase.jobs) for at in (place, place + 1)
        )
        return first, end - first

    def jobs_before(self, at: int) -> Array:
        """The number of this thread block's jobs in the phases before ``at``."""
        return sum((self.own_jobs(phase)[1] for phase in self.phases[:at]), jnp.int32(0))

    def blocks_before(self, at: int) -> Array:
        """The number of this thread block's blocks in the phases before ``at``. Its blocks are
        numbered through all phases; warpgroups, and places in the ring, take them in turn."""
        before = [self.own_jobs(phase)[1] * phase.blocks for phase in self.phases[:at]]
        return sum(before, jnp.int32(0))


def splits_of(units: int) -> int | None:
    """The fewest parts of so many units that are whole blocks and of which x fits; None: none."""
    for splits in range(1, MOST_SPLITS + 1):
        if not units % (splits * BLOCK) and units // splits <= MOST_INPUTS:
            return splits
    return None
