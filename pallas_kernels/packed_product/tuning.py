"""Sizes of the Hopper kernel's blocks, and how its products are split.

Chosen by counting, as the kernel has never run. An H100's memory gives each of 132 multiprocessors
12.8 bytes a cycle at 2.96 TB/s and 1.755 GHz: 64 x 128 weights of 4 bits in 320 cycles. Compiled
for sm_90a by jax 0.12.0.1, they take each warp of a warpgroup 201 issue slots at 8 rows, 205 at 16,
234 at 32 and 258 at 64. The integer units work 144 of the cycles, and at 64 rows the tensor cores
256. For Llama-3.1-8B, groups of 128, us of weights and scales at that bandwidth, and of partial
sums written and read:

| rows | product | warpgroups x CTAs | parts | blocks of a CTA | stages | KiB, registers | us |
|---|---|---|---|---|---|---|---|
| 8 | gate and up | 2 x 224 | 1 | 16 | 5 | 107, 70 | 20.5 + 0.6 |
| 8 | down | 2 x 256 | 8 | 7 | 5 | 107, 70 | 10.2 + 0.7 |
| 8 | q, k and v | 2 x 192 | 4 | 4 | 5 | 107, 70 | 4.4 + 0.5 |
| 8 | o | 2 x 128 | 4 | 4 | 5 | 107, 70 | 2.9 + 0.4 |
| 16 | gate and up | 2 x 224 | 1 | 16 | 4 | 106, 79 | 20.5 + 1.2 |
| 64 | gate and up | 4 x 112 | 1 | 32 | 4 | 194, 96 | 20.5 + 5.0 |
| 64 | down | 2 x 128 | 4 | 28 | 7 | 202, 117 | 10.2 + 2.8 |

Two CTAs of three warpgroups share a multiprocessor if a thread has at most 80 registers.
"""

import dataclasses

from pallas_kernels.policy import MULTIPROCESSORS

OUTPUTS = 64  # of a warpgroup: what the tensor cores take
LARGEST_STEP = 128  # inputs that are summed before the sums are scaled
SUMMED_ROWS = 64  # of more rows weights are scaled, instead of sums
SCALED_ROWS = 32  # scales of so many rows are copied at once: 128 bytes
MAX_SPLITS = 8
MIN_SPLIT_DEPTH = 1024  # inputs: shorter parts end before the copies have come up to speed
MOST_STAGES = 8
SHARED_BYTES = 227 << 10  # of a multiprocessor, 1 KiB for each CTA taken off
BARRIER_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class PackedTuning:
    """One variant of the kernel.

    Attributes:
      warpgroups: that multiply; each has 64 outputs.
      block: inputs of a block; fewer where a part of the inputs is no multiple of it.
      unit: inputs whose weights a warpgroup has in registers at once: 32, 64 or 128.
      ctas: that share a multiprocessor and its memory.
      most_stages: most blocks of a CTA in shared memory.
    """

    warpgroups: int = 2
    block: int = 256
    unit: int = 64
    ctas: int = 2
    most_stages: int = MOST_STAGES

    @property
    def tile(self) -> int:
        """Outputs of a CTA."""
        return OUTPUTS * self.warpgroups

    def stages(self, stage: int, results: int) -> int:
        """Blocks of ``stage`` bytes that fit the shared memory of a CTA beside its results.

        Raises ValueError if it has no room for two.
        """
        room = SHARED_BYTES // self.ctas - BARRIER_BYTES - results
        if room < 2 * stage:
            raise ValueError(f"two blocks of {stage} bytes do not fit {room} bytes: see {self}")
        return min(room // stage, self.most_stages)


# To be timed beside the chosen one, at 6 and at 64 rows: half the registers spent on latency; more
# and fewer multiplying warpgroups for each producer; shorter lines of weights.
VARIANTS = (
    PackedTuning(unit=128, ctas=1),
    PackedTuning(warpgroups=4, block=128, unit=32, ctas=1),
    PackedTuning(block=128),
)


def packed_tuning(rows: int, width: int) -> PackedTuning:
    """The variant for x [rows, in] and weights [width, in]; the same for 8 rows and fewer, and so
    on: rows are padded to a multiple of 8."""
    if rows <= 8:
        return PackedTuning(warpgroups=1, ctas=6)
    if rows <= 16:
        return PackedTuning(warpgroups=1, ctas=5)
    if rows <= 32:
        return PackedTuning(block=128)
    if rows > SUMMED_ROWS:
        return PackedTuning(block=64, ctas=1)
    # The registers of more rows leave no room for a second CTA. Each CTA reads all of x: wider ones
    # read it less often, where enough of them remain.
    wide = width % 256 == 0 and width // 256 > 3 * MULTIPROCESSORS // 4
    if wide:  # 640 threads have 96 registers each
        return PackedTuning(warpgroups=4, block=128, ctas=1)
    return PackedTuning(unit=128, ctas=1)


def choose_packed_splits(rows: int, depth: int, width: int) -> int:
    """Parts of the inputs that are summed separately, so that all multiprocessors have work.

    It depends on the padded rows only. Partial sums cost time: where all multiprocessors have work
    anyway, they have at most an eighth of the weights' bytes.
    """
    config, padded_rows = packed_tuning(rows, width), -(-rows // 8) * 8
    tiles, splits = width // config.tile, 1
    while 2 * splits * tiles <= config.ctas * MULTIPROCESSORS and splits < MAX_SPLITS:
        part, has_idle = depth // (2 * splits), splits * tiles < 3 * MULTIPROCESSORS // 4
        if part < MIN_SPLIT_DEPTH or depth % (2 * splits * LARGEST_STEP):
            break
        if not has_idle and 4 * padded_rows > part // 2 // 8:
            break
        splits *= 2
    return splits
