"""How many blocks of weights fit the shared memory of a thread block, for kernels whose producer
copies them there ahead of the warpgroups that multiply."""

from typing import Protocol

SHARED_BYTES = 227 << 10  # of a multiprocessor, 1 KiB for each CTA taken off
BARRIER_BYTES = 2048


class RingTuning(Protocol):
    """A variant of such a kernel."""

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor and its memory."""
        ...

    @property
    def most_stages(self) -> int:
        """Most blocks of a CTA in shared memory."""
        ...


def ring_stages(tuning: RingTuning, stage: int, results: int) -> int:
    """Blocks of ``stage`` bytes that fit the shared memory of a CTA beside its results.

    Raises ValueError if it has no room for two.
    """
    free = SHARED_BYTES // tuning.ctas - BARRIER_BYTES - results
    if free < 2 * stage:
        raise ValueError(f"two blocks of {stage} bytes do not fit {free} bytes: see {tuning}")
    return min(free // stage, tuning.most_stages)
