"""Block sizes of all kernels, in one place, with the devices they were measured on."""

import dataclasses
from collections.abc import Callable

from pallas_kernels.selection import Kernels

MULTIPROCESSORS = 132
MOST_ROWS_IN_PARTS = 256  # of a product whose parts a kernel adds up
LEAST_RUN = 128  # of a part
WHOLE_RUN = 3072  # of a part, which XLA leaves whole; it divides 3584 with these rows
DIVIDED_ROWS = range(6, 65)
LONG_RUN = 1024  # slots of a split
ROWS = 64  # query rows of a warpgroup's matrix product
REGISTERS = 65536  # of a multiprocessor
FEWEST_REGISTERS = 24  # that a thread can be left with


def fewest_rows(kernels: Kernels) -> int:
    """Rows that a pass of the target should have, padding included.

    A single row's products come in parts only when it is padded (see products.product_parts), which
    takes a launch of its own wherever a kernel made the row. A padding node costs none. Drafting
    steps of a single row are left as they are.
    """
    return 2 if "add_rms_norm" in kernels or "rope_kv_write" in kernels else 1


def parts_of_product(rows: int, depth: int, width: int) -> int:
    """Parts, each over a run of ``depth``, of a product [rows, depth] x [depth, width].

    They are for a kernel to add up: ask only where one does. XLA divides the products whose tiles
    do not spread over all multiprocessors, and adds up the parts in a launch of its own. Measured
    on an H100, us of [48, 14336] x [14336, 4096] in 2, 4, 8, 16 parts: 54.3, 51.5, 52.4, 56.1; of
    4096 x 4096: 18.8, 18.1, 18.8, 20.4; with 2 and 6 rows within 4 %. More parts take their
    consumer longer. But of 6 to 64 rows XLA divides the four parts of 14336 again, in a launch
    more. With 8 parts, whole rounds over 16 layers took less: 17 us with 6 rows, 12 with 8, 16 with
    32, 21 with 48, 33 with 60. (128 rows, which XLA does not divide, took 213 us more over 32
    layers, in another run.)
    """
    if rows > MOST_ROWS_IN_PARTS:
        return 1
    tiles = -(-rows // 128) * -(-width // 128)
    most_tiles = 3 * MULTIPROCESSORS // 2
    parts = _most(lambda parts: depth % (parts * LEAST_RUN) == 0 and parts * tiles <= most_tiles)
    divided_again = parts == 4 and rows in DIVIDED_ROWS and depth > parts * WHOLE_RUN
    return 8 if divided_again and depth % (8 * LEAST_RUN) == 0 else parts


@dataclasses.dataclass(frozen=True)
class AttentionTuning:
    """How paged attention divides its work.

    Attributes:
      block: context slots of one step.
      stages: blocks in flight.
      warpgroups: compute warpgroups of a CTA for each of its KV heads; they share keys and values.
      heads: KV heads of a CTA.
      splits: CTAs that share one context.
      turns: two warpgroups, on the same blocks, take turns with the matrix unit.
      registers: a compute thread's, taken from the producer; None leaves them as compiled.

    Raises ValueError for turns of other than two warpgroups of one head, and for more registers
    than a CTA has: its threads would wait for them for ever.
    """

    block: int
    stages: int
    warpgroups: int = 1
    heads: int = 1
    splits: int = 1
    turns: bool = False
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.turns and (self.warpgroups, self.heads) != (2, 1):
            raise ValueError("turns are for two warpgroups of one head")
        if self.registers is not None and self.producer_registers < FEWEST_REGISTERS:
            raise ValueError(
                f"{self.registers} registers in each of {self.consumers} compute warpgroups leave "
                f"{self.producer_registers} to the producer: it needs {FEWEST_REGISTERS}"
            )

    @property
    def consumers(self) -> int:
        """Compute warpgroups of a CTA."""
        return self.warpgroups * self.heads

    @property
    def producer_registers(self) -> int:
        """What the compute warpgroups leave of a CTA's registers to a producer's thread."""
        groups = self.consumers + 1
        launched = REGISTERS // (128 * groups) // 8 * 8  # a thread's share, in steps of 8
        return groups * launched - self.consumers * (self.registers or launched)


def attention_tuning(
    batch: int, kv_heads: int, row_tiles: int, slots: int, page_size: int
) -> AttentionTuning:
    """For pairs of a sequence and a KV head, each with ``row_tiles`` tiles of 64 query rows.

    ``slots`` is the longest context that the page table could hold. Measured on an H100 with 32
    query and 8 KV heads (sequences x context, queries: us of the choice; others), before turns but
    for their own line:

    - 8 x 8k, 8: 98 in 2 splits of 128-slot blocks; of 64-slot blocks 100, without splits 101.
    - 8 x 1k, 1: 18.7 without splits, 18.9 in 2. 8 x 640, 1: 13.0 with 2 stages, 14.3 with 5.
    - 1 x 1k, 6: 9.9 in 8 splits, 11.1 in 4. 1 x 8k, 8: 19.7 with 128-slot blocks, 21.7 with 64.
    - 1 x 1k, 60: 16.5 in 4 splits of 64-slot blocks; of 128 19.8, in 8 splits (two waves) 31.
    - 8 x 8k, 64: 143 without splits, 205 in 2.
    - Turns: 8 x 8k, 64: 132.7, without 136.0; with pages of 16 145.3, without 141.9. 1 x 3.5k, 512:
      62.4, without 67.4. 1 x 8k, 64: 39.1, without 41.5. 1 x 1k, 60: 16.8, without 16.6.
    - 32 x 640, 6: 37.8 with two heads a CTA, 39.9 with one, 42.7 with one and 5 stages.
    """
    pairs = batch * kv_heads
    if row_tiles > 1:
        splits = _splits(pairs * -(-row_tiles // 2), slots // 256)
        if splits > 1 and slots // splits < LONG_RUN:
            return AttentionTuning(block=64, stages=2, warpgroups=2, splits=splits)
        return AttentionTuning(
            block=128,
            stages=2,
            warpgroups=2,
            splits=splits,
            turns=page_size >= 64,  # smaller pages come too slowly
            registers=240,
        )
    if pairs > MULTIPROCESSORS and kv_heads % 2 == 0:
        return AttentionTuning(block=64, stages=2, heads=2)
    splits = _splits(pairs, slots // (1024 if 4 * pairs > MULTIPROCESSORS else 128))
    if splits == 1:
        return AttentionTuning(block=64, stages=2)
    if slots // splits < LONG_RUN:
        return AttentionTuning(block=64, stages=5, splits=splits)
    return AttentionTuning(block=128, stages=2, splits=splits)


def top_k_shares(size: int) -> int:
    """Thread blocks that share a row of ``size``: as many as leave each 4096 entries or fewer, 8 at
    most (a cluster). They stay in registers, 32 a thread; 64 of the longest rows."""
    return _most(lambda shares: shares * 4096 < 2 * size)


def truncate_shares(size: int) -> int:
    """Thread blocks that share a row of ``size``, 8 at most (a cluster).

    They follow from the size alone: a row's sums must not depend on how many rows there are.
    """
    return _most(lambda shares: shares * 2048 <= size)


def _splits(blocks: int, most: int) -> int:
    """As many as give no multiprocessor a second CTA, 8 at most (a cluster).

    A cluster needs its multiprocessors in one of the GPU's groups: clusters of 4 and more cannot
    use them all (128 CTAs in clusters of 8, or of 4, ran in two waves).
    """
    return _most(
        lambda splits: (
            splits <= most
            and splits * blocks <= (MULTIPROCESSORS if splits == 2 else MULTIPROCESSORS // 2)
        )
    )


def _most(fits: Callable[[int], bool]) -> int:
    """The last of 1, 2, 4, 8 before one that does not fit; 1 always does."""
    number = 1
    while number < 8 and fits(2 * number):
        number *= 2
    return number
