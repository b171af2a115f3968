"""How an engine serves requests."""

import dataclasses
from typing import Literal

from jaxspec.config.checks import check_count

Preemption = Literal["auto", "recompute", "swap"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine serves requests.

    Attributes:
      max_rows: most requests that run together; further ones wait until one of them ends.
      rounds_per_call: most rounds between two looks at the results.
      prefill_budget: most prompt tokens that are read between two calls of rounds, so that a long
        prompt does not hold up the requests that are running.
      max_queue: most requests that may wait; None: any number.
      prefix_caching: keep the pages of earlier requests for prompts that begin alike.
      preemption: with too few pages, ``recompute`` some requests later, or ``swap`` their pages to
        host memory; ``auto`` swaps where it can. In bfloat16 only swapping is exact.
      deterministic: in bfloat16, too, the text of a request is the same alone and in any batch,
        with any drafter and tree, and with prefix hits and swaps, in engines of equal sizes. It
        costs time; see docs/exactness.md.
      max_programs: most compiled programs that are kept. Beyond them, or when memory maps are
        scarce (see memory.py), all are forgotten, and compiled again as they are needed.

    Raises ValueError for values that cannot work.
    """

    max_rows: int = 16
    rounds_per_call: int = 32
    prefill_budget: int = 2048
    max_queue: int | None = None
    prefix_caching: bool = True
    preemption: Preemption = "auto"
    deterministic: bool = False
    max_programs: int = 64

    def __post_init__(self):
        for name in ("max_rows", "rounds_per_call", "prefill_budget", "max_programs"):
            check_count(name, getattr(self, name))
        if self.max_queue is not None:
            check_count("max_queue", self.max_queue)
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ValueError(
                f'preemption must be "auto", "recompute" or "swap", got {self.preemption!r}'
            )
        if self.deterministic and self.preemption == "recompute":
            raise ValueError(
                'preemption="recompute" is not exact in bfloat16: with deterministic=True give '
                '"swap", or leave it out'
            )
