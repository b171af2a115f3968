"""How the latent attention kernel divides its work. Only the default was timed."""

import dataclasses

from pallas_kernels.h100 import MULTIPROCESSORS

MOST_STORED = 576  # entries of a vector: 64 queries and two blocks of 64 slots fill shared memory
LEAST_SPLIT = 256  # context slots, at least, of a part of a context


@dataclasses.dataclass(frozen=True)
class LatentTuning:
    """How latent attention divides its work.

    Attributes:
      splits: thread blocks (CTAs) that share one context; their parts are merged afterwards.
      block: context slots processed in one step.
      stages: blocks in flight (depth of the shared-memory ring).
      registers: registers of a compute thread, the rest are the producer warpgroup's.
    """

    splits: int = 1
    block: int = 64
    stages: int = 2
    registers: int = 232

    @property
    def producer_registers(self) -> int:
        """The share of the 3 x 168 that three warpgroups start with."""
        return 3 * 168 - 2 * self.registers


def latent_tuning(batch: int, tiles: int, slots: int) -> LatentTuning:
    """The tuning for a call: ``tiles`` of 64 query rows in each of ``batch`` sequences, ``slots``
    the longest context that the page table can hold.

    A CTA takes all of a multiprocessor's shared memory, so there are at most as many as
    multiprocessors, if one part of each context leaves some idle.
    """
    splits = min(MULTIPROCESSORS // (batch * tiles), slots // LEAST_SPLIT)
    return LatentTuning(splits=max(splits, 1))
