"""Choices made for Hopper GPUs: sizes of the kernel's blocks.

Chosen by times on an H200, see docs/results/experts.md.
"""

import dataclasses

OUTPUTS = 64  # of a warpgroup: what the tensor cores take
MOST_STAGES = 16
LEAST_LONG = 1024  # inputs: of so many, a CTA multiplies for long once it has begun


@dataclasses.dataclass(frozen=True)
class ExpertTuning:
    """One variant of the kernel.

    Attributes:
      warpgroups: that multiply; each has 64 outputs.
      block: inputs of a block: a multiple of 64.
      ctas: that share a multiprocessor and its memory.
      most_stages: most blocks of a CTA in shared memory.
    """

    warpgroups: int = 1
    block: int = 64
    ctas: int = 2
    most_stages: int = MOST_STAGES

    @property
    def tile(self) -> int:
        """Outputs of a CTA."""
        return OUTPUTS * self.warpgroups


def expert_tuning(lanes: int, depth: int, width: int) -> ExpertTuning:
    """The variant for slots of so many lanes, and so many inputs and outputs of an expert."""
    pairs_up = lanes >= 32 and width % (2 * OUTPUTS) == 0  # lanes are read once for 128 outputs
    if pairs_up and lanes >= 64 and depth >= LEAST_LONG:  # a longer ring is worth more than a CTA
        return ExpertTuning(warpgroups=2, ctas=1)
    return ExpertTuning(warpgroups=2 if pairs_up else 1)
