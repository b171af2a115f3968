"""How an engine serves requests."""

import dataclasses
import math
from typing import Any, Literal

from jaxspec.config.checks import check_count, is_number
from jaxspec.config.speculation import TreeShape

Preemption = Literal["auto", "recompute", "swap"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine serves requests.

    Attributes:
      max_rows: most requests that run together; further ones wait until one of them ends.
      rounds_per_call: most rounds between two looks at the results; where programs run a fixed
        number (see ``fixed_rounds``), at most 8.
      prefill_budget: most prompt tokens that are read between two calls of rounds, so that a long
        prompt does not hold up the requests that are running. None: 2048, or what the device is
        estimated to read in a second, if that is less. Old texts that are drafts are verified
        beside them: up to as many tokens again of each data-parallel shard, at least 64.
      max_queue: most requests that may wait; None: any number.
      prefix_caching: keep the pages of earlier requests for prompts that begin alike.
      preemption: with too few pages, ``recompute`` some requests later, or ``swap`` their pages to
        host memory; ``auto`` does what is cheaper, by what ``warm_up`` and calls since have shown,
        and swaps until that is known. In bfloat16 only swapping is exact.
      swap_memory: GiB of host memory for swapped requests. Those that do not fit are recomputed; in
        deterministic mode, requests wait instead until all that run could be swapped.
      snapshot_memory: GiB of host memory for snapshots of recurrent layers' states, without which
        prompts that begin alike cannot share pages. 0: such models have no prefix cache.
      fixed_rounds: programs run one round or several, as many as they are made for, so that no
        launch waits for the device; on a GPU, a launch of a program that decides after each round
        returns only when they have run. None: on GPUs.
      deterministic: in bfloat16, too, the text of a request is the same alone and in any batch,
        with any drafter and tree, and with prefix hits and swaps, in engines of equal sizes. It
        costs time; see docs/exactness.md.
      max_programs: most compiled programs that are kept. Beyond them, or when memory maps are
        scarce (see memory.py), all are forgotten, and compiled again as they are needed.
      adaptive: choose the draft tree of each call, or none, by what a round costs and what the rows
        have accepted. The costs are estimated, or with True measured by ``warm_up``, and corrected
        by the calls that serve. In float32 texts stay as they are; so does their distribution under
        the ``rejection`` rule, but there a seed may give another text each time. False: always the
        largest tree. None: adaptive if nobody asked for a tree. Then, where the tree changes texts
        by rounding (in bfloat16 without a fixed verify width), the choices are the largest tree,
        chains of 2 and 3 (of 1 and 2 beside a tree no deeper than 3) and plain decoding, by
        estimates alone: the same requests get the same texts again. In float32, while so many
        requests run that no tree is expected to gain much (as on a CPU), the drafter is left out.
      shapes: trees to choose from besides plain decoding, which is always a choice. None: chains of
        1 and 3, where they are shorter than the largest tree, and that tree.
      trees: programs emit the draft tree of every round, for requests that ask for it (see
        SamplingParams.trees). It costs a little time, for all requests.

    Raises ValueError for values that cannot work.
    """

    max_rows: int = 16
    rounds_per_call: int = 32
    prefill_budget: int | None = None
    max_queue: int | None = None
    prefix_caching: bool = True
    preemption: Preemption = "auto"
    swap_memory: float = 4.0
    snapshot_memory: float = 4.0
    fixed_rounds: bool | None = None
    deterministic: bool = False
    max_programs: int = 288
    adaptive: bool | None = None
    shapes: tuple[TreeShape, ...] | None = None
    trees: bool = False

    def __post_init__(self):
        for name in ("max_rows", "rounds_per_call", "max_programs"):
            check_count(name, getattr(self, name))
        for name in ("prefill_budget", "max_queue"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ValueError(
                f'preemption must be "auto", "recompute" or "swap", got {self.preemption!r}'
            )
        for name in ("swap_memory", "snapshot_memory"):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be GiB, at least 0, got {value!r}")
        if self.deterministic and self.preemption == "recompute":
            raise ValueError(
                'preemption="recompute" is not exact in bfloat16: with deterministic=True give '
                '"swap", or leave it out'
            )
        if not (self.fixed_rounds is None or isinstance(self.fixed_rounds, bool)):
            raise ValueError(f"fixed_rounds must be True, False or None, got {self.fixed_rounds!r}")
        if not (self.adaptive is None or isinstance(self.adaptive, bool)):
            raise ValueError(f"adaptive must be True, False or None, got {self.adaptive!r}")
        for name in ("prefix_caching", "deterministic", "trees"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.shapes is not None:
            self._check_shapes(self.shapes)

    def _check_shapes(self, shapes: Any) -> None:
        if not self.adaptive:
            raise ValueError("shapes are what adaptive chooses from: set adaptive=True, too")
        kinds = isinstance(shapes, tuple) and {type(shape) for shape in shapes}
        if kinds != {TreeShape}:
            raise ValueError(f"shapes must be a tuple of TreeShape, not empty, got {shapes!r}")
        if len(set(shapes)) != len(shapes):
            raise ValueError("shapes must not name a tree twice")
