"""How resident_product divides its work. Chosen by counting: the kernel was compiled but never ran.

To reach: 2.96 TB/s are 12.8 bytes, or 25.6 weights, a clock of each of an H100's 132
multiprocessors (1.755 GHz).

Counted in the machine code for groups of 128 and 16 rows (jax 0.12.0.1, ptxas 13.5): a warp takes
381 instructions for a block, 8 KiB of weights of which it has a quarter. So four schedulers could
do 21 bytes a clock: 60 % of them are needed. Of these instructions 112 are shifts and logic (half
rate, 35 % of it needed), 64 subtract the bias, 64 only move a mask to a register, 16 load weights,
16 are matrix products (m64n16k16). These may take up to 40 clocks each. No register is spilled
(but 3 with 64 rows, groups of 32 and zeros); threads have 168 at launch, 87 with four consumers.

Predicted for Llama-3.1-8B, groups of 128: us with the partial sums written and read; splits, items
of the busiest CTA, blocks of weights in flight. Least: weights alone at 2.96 TB/s.

| product | least | 8 rows | 16 rows | 64 rows |
|---|---|---|---|---|
| qkv | 4.3 | 4.9 (4, 3, 12) | 5.4 (4, 3, 12) | 8.6 (4, 3, 6) |
| o | 2.8 | 3.1 (2, 1, 12) | 3.3 (2, 1, 12) | 5.8 (4, 2, 6) |
| gate and up | 19.8 | 21.7 (2, 7, 12) | 22.9 (2, 7, 12) | 40.3 (4, 14, 6) |
| down | 9.9 | 10.4 (2, 1, 10) | 10.9 (4, 2, 10) | 21.6 (14, 8, 6) |
| LM head | 88.7 | 96.1 (2, 31, 12) | 99.1 (1, 16, 8) | 177.9 (4, 61, 6) |

To that come about 2 us of a launch's begin and end. With 64 rows partial sums cost as much as
weights: x of fewer splits does not fit shared memory, and would have to be loaded block by block.
"""

import dataclasses
import functools

from pallas_kernels.policy import MULTIPROCESSORS

TILE = 64  # output features of a work item: the rows of one warpgroup matrix product (wgmma)
PADDED_ROWS = (8, 16, 24, 32, 48, 64)  # columns of such a product that rows of x are padded to
MOST_ROWS = PADDED_ROWS[-1]
BLOCK = 256  # least inputs of a block: int4 rows of 128 bytes, which TMA swizzles as one line
MAX_SPLITS = 16
X_BYTES = 128 << 10  # most shared memory for x: the rest must hold weights in flight
RING_BYTES = 96 << 10  # weights in flight; 132 of 32 KiB would cover the latency of the memory
SHARED_BYTES = 232_448  # of a CTA on an H100
BARRIER_BYTES = 4096  # room for barriers and alignment
BYTES_PER_SECOND = 2.96e12  # copy bandwidth of an H100


@dataclasses.dataclass(frozen=True)
class ProductTuning:
    """How the kernel divides a product.

    Attributes:
      block: inputs of a block of weights, which is one TMA copy of 64 output features.
      consumers: warpgroups that multiply; they take the blocks of an item in turns.
      most_stages: most blocks in flight. Fewer if shared memory is full; a multiple of
        ``consumers``.

    Raises ValueError for a block that is no multiple of 256, and for a ring of fewer blocks than
    warpgroups.
    """

    block: int = BLOCK
    consumers: int = 2
    most_stages: int = RING_BYTES // (TILE * BLOCK // 2)

    def __post_init__(self) -> None:
        if self.block % BLOCK:
            raise ValueError(f"blocks of {self.block} inputs: they must be multiples of {BLOCK}")
        if self.most_stages < self.consumers:
            raise ValueError(f"{self.most_stages} blocks for {self.consumers} warpgroups: too few")

    def __str__(self) -> str:
        return f"{self.consumers} warpgroups, {self.most_stages} blocks of {self.block}"

    @property
    def stage_bytes(self) -> int:
        return TILE * self.block // 2


DEFAULT = ProductTuning()
# To be timed in one run: half as many barriers for each byte, more warpgroups to hide latencies,
# and a shorter ring, which leaves memory that nothing uses and so tests whether depth matters.
VARIANTS = (
    DEFAULT,
    ProductTuning(block=512, most_stages=6),
    ProductTuning(consumers=4),
    ProductTuning(most_stages=4),
)


def padded_rows(rows: int) -> int:
    """Columns of the matrix products for so many rows of x.

    Raises ValueError for more than MOST_ROWS.
    """
    for padded in PADDED_ROWS:
        if rows <= padded:
            return padded
    raise ValueError(f"{rows} rows: at most {MOST_ROWS}")


@functools.cache
def choose_num_splits(rows: int, depth: int, width: int) -> int:
    """Number of partial sums of a product [rows, depth] x [depth, width] of 4-bit weights.

    The one of the least predicted time; see ``predicted_seconds``. It depends on the padded rows
    only, so that a row's result does not depend on the number of other rows with the same padding.
    1 if no number leaves room for x.
    """
    padded = padded_rows(rows)
    fitting = [splits for splits in range(1, MAX_SPLITS + 1) if fits(padded, depth, splits)]
    return min(
        fitting, key=lambda splits: predicted_seconds(padded, depth, width, splits), default=1
    )


def fits(padded: int, depth: int, splits: int) -> bool:
    """Whether a split's part of x stays in shared memory, and consists of whole blocks."""
    return depth % (splits * BLOCK) == 0 and 2 * padded * depth // splits <= X_BYTES


def predicted_seconds(padded: int, depth: int, width: int, splits: int) -> float:
    """Time of the weights and of the partial sums, which are written once and read once.

    Weights take as long as the multiprocessor with the most items needs for its own, at its share
    of the bandwidth.
    """
    items = -(-width // TILE // groups_of(splits, width))
    weights = items * TILE * depth // splits // 2 * MULTIPROCESSORS
    partials = 2 * 4 * splits * padded * width
    return (weights + partials) / BYTES_PER_SECOND


def groups_of(splits: int, width: int) -> int:
    """CTAs that share the items of one split; each takes every so manieth tile."""
    return min(MULTIPROCESSORS // splits, width // TILE)
