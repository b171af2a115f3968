"""Sizes of a launch of expert_gate_up_down, and which part of each product a thread block computes.

The two products are *phases* of the launch. The outputs of a phase, of all slots that have an
expert, are divided into *jobs*, of which a thread block has whole sums. Every job is as many blocks
of weights for each warpgroup that multiplies: 16 rows of some inputs.

- Of gate and up, a job has 8 units, of which a block has both rows. Warpgroups share the inputs.
- Of down, a job has 64 outputs, 16 for each warpgroup, which has all their inputs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.ring import ring_stages
from pallas_kernels.shared_memory import LINE
from pallas_kernels.top_k.routes import RouteRule

ROWS = 8  # of x, padding included: what a product of the tensor cores takes
TILE = 16  # outputs, likewise
UNITS = TILE // 2  # of a job of gate and up
WARPS = 4  # of a warpgroup; each has a part of a block's inputs
WARPGROUPS = 4  # that multiply
THREADS = 128  # of a warpgroup
OUTPUTS = TILE * WARPGROUPS  # of a job of down
BUFFERS = 2  # jobs whose parts are in shared memory
MOST_STAGES = 8  # 32 barriers for all warpgroups, as many as Mosaic takes
GROUP = 32  # inputs that share a scale, where that is a byte
BLOCK_INPUTS = (512, 256, 128)  # the most that divides both products' inputs is taken

PART = 256  # inputs of a warp, of a router's product
LOGITS_STEP = 128  # entries that a row of logits is a multiple of

PhaseName = Literal["gate_up", "down"]
PHASES: tuple[PhaseName, ...] = ("gate_up", "down")
Filled = Mapping[str, Array]  # how many slots have an expert, by the name of its kind


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One variant of the kernel.

    Attributes:
      stages: most blocks of a warpgroup in shared memory.
      blocks: thread blocks of the launch, one on each multiprocessor. On a GPU with fewer of those
        they would wait for each other for ever.
    """

    stages: int = MOST_STAGES
    blocks: int = MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class Stored:
    """How weights are stored.

    Attributes:
      scaled: outputs and inputs that share a scale: blocks with floats, which multiply sums, or
        groups of GROUP inputs of an output with bytes (e8m0), which multiply weights.
    """

    code: Literal["e4m3", "e2m1"]
    scaled: tuple[int, int]

    @property
    def bits(self) -> int:
        return 8 if self.code == "e4m3" else 4

    @property
    def has_bytes(self) -> bool:
        """Whether scales are bytes."""
        return self.scaled[0] == 1

    @property
    def sums(self) -> int:
        """Sums of a block, to which a warp adds products in turn: each waits for the one before of
        the same."""
        return 2 if self.has_bytes else 1

    @property
    def scales_ahead(self) -> int:
        """Blocks before which scales are read. Each byte is read once; floats are shared by the
        jobs that follow."""
        return 2 if self.has_bytes else 1

    def block(self, hidden: int, units: int) -> int | None:
        """Inputs of a block; None where no size fits both products."""
        for size in BLOCK_INPUTS:
            lines = size * self.bits // 8 % LINE == 0
            if lines and hidden % (WARPGROUPS * size) == 0 and units % size == 0:
                return size
        return None


def row_of(kinds: Sequence[Stored], hidden: int, units: int) -> int | None:
    """Bytes of a row of a block, which is the same of all kinds; None where no size fits."""
    blocks = [stored.block(hidden, units) for stored in kinds]
    rows = [size * stored.bits // 8 for size, stored in zip(blocks, kinds, strict=True) if size]
    return min(rows) if len(rows) == len(kinds) else None


@dataclasses.dataclass(frozen=True)
class Kind:
    """Experts that are stored in one way.

    Attributes:
      first, count: their numbers among all.
      name: in front of the names of their arrays.
    """

    stored: Stored
    first: int
    count: int
    name: Literal["experts", "shared"] = "experts"


@dataclasses.dataclass(frozen=True)
class RouterPlan:
    """Sizes of a router's product in front of the two, whose outputs are logits.

    Attributes:
      experts: that rows choose among.
      logits: of those, and of a shared expert's gate if there is one.
      blocks: thread blocks of the launch.
    """

    rule: RouteRule
    experts: int
    logits: int
    hidden: int
    blocks: int

    @property
    def parts(self) -> int:
        """Parts of the inputs."""
        return self.hidden // PART

    @property
    def of_block(self) -> int:
        """Logits of a thread block; the last ones may have fewer."""
        return -(-self.logits // self.blocks)

    @property
    def jobs(self) -> int:
        """Sums of a thread block, of each row."""
        return self.of_block * self.parts

    @property
    def turns(self) -> int:
        """Jobs of a warp."""
        return -(-self.jobs // (WARPGROUPS * WARPS))

    @property
    def count(self) -> int:
        """Experts of a row, the shared one included."""
        return self.rule.k + self.rule.has_shared


@dataclasses.dataclass(frozen=True)
class Phase:
    """One of the products of a kind of experts.

    Attributes:
      jobs: of a slot.
      block: inputs of a block.
      steps: blocks of a job that each warpgroup multiplies.
    """

    name: PhaseName
    kind: Kind
    jobs: int
    block: int
    steps: int

    @property
    def stored(self) -> Stored:
        return self.kind.stored

    @property
    def key(self) -> str:
        """In front of the names of its arrays."""
        return f"{self.kind.name}.{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a launch.

    Attributes:
      kinds: of experts, by their numbers.
      router: its product, and that choices are made of its logits; None: slots are known.
      routes: whether the launch computes that product.
      names: its phases.
    """

    rows: int
    slots: int
    hidden: int
    units: int
    kinds: tuple[Kind, ...]
    tuning: Tuning
    router: RouterPlan | None = None
    routes: bool = False
    names: tuple[PhaseName, ...] = PHASES
    interpret: bool = False

    @property
    def row(self) -> int:
        """Bytes of a row of a block."""
        return row_of([kind.stored for kind in self.kinds], self.hidden, self.units) or 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Those of all kinds for gate and up, then those for down."""
        return tuple(self._phase(name, kind) for name in self.names for kind in self.kinds)

    def _phase(self, name: PhaseName, kind: Kind) -> Phase:
        block = self.row * 8 // kind.stored.bits
        if name == "gate_up":
            return Phase(name, kind, self.units // UNITS, block, self.hidden // block // WARPGROUPS)
        return Phase(name, kind, self.hidden // OUTPUTS, block, self.units // block)

    def begins(self, at: int) -> bool:
        """Whether a phase is the first of its product."""
        return at == 0 or self.phases[at - 1].name != self.phases[at].name

    @property
    def stages(self) -> int:
        """Blocks of a warpgroup in the ring."""
        parts = 4 * BUFFERS * WARPGROUPS * WARPS * TILE * ROWS
        beside = 2 * ROWS * self.hidden + parts + 8 * self.slots + 4 * THREADS
        beside += 8 * self.slots * len(self.kinds)
        return ring_stages(1, WARPGROUPS * TILE * self.row, beside, self.tuning.stages)

    def own_jobs(self, at: int, filled: Filled) -> tuple[Array, Array]:
        """The first of this thread block's jobs in a phase, and their number, where so many slots
        have an expert of each kind."""
        block = kernel_axes.index("block")
        first, end = (self._jobs_before(at, filled, place) for place in (block, block + 1))
        return first, end - first

    def _jobs_before(self, at: int, filled: Filled, place: Array) -> Array:
        """The number of the jobs of thread blocks before ``place``.

        Where jobs of both products of a kind are equally long, those of both together are divided
        evenly, too.
        """

        def even(number: Array) -> Array:
            return lax.div(place * number, self.tuning.blocks)

        phase = self.phases[at]
        slots = filled[phase.kind.name]
        jobs = slots * phase.jobs
        former = [each for each in self.phases[:at] if each.kind == phase.kind]
        if [each.steps for each in former] != [phase.steps]:
            return even(jobs)
        before = slots * former[0].jobs
        return jnp.where(jobs < self.tuning.blocks, even(jobs), even(before + jobs) - even(before))

    def steps_before(self, at: int, filled: Filled) -> Array:
        """The blocks of each warpgroup of this thread block in the phases before ``at``. Blocks
        are numbered through both phases; they take places in the ring in turn."""
        before = [
            self.own_jobs(index, filled)[1] * phase.steps
            for index, phase in enumerate(self.phases[:at])
        ]
        return sum(before, jnp.int32(0))

    def jobs_before(self, at: int, filled: Filled) -> Array:
        """The number of this thread block's jobs in the phases before ``at``."""
        before = [self.own_jobs(index, filled)[1] for index in range(at)]
        return sum(before, jnp.int32(0))
