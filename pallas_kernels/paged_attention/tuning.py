"""How the paged attention kernel divides its work, measured on an H100."""

import dataclasses

from pallas_kernels.h100 import MULTIPROCESSORS, largest_fitting

ROWS = 64  # query rows of one warpgroup matrix product (wgmma)
LONG_SPLIT = 1024  # context slots from which a split uses 128-slot blocks
REGISTERS = 65536  # of a multiprocessor
MIN_REGISTERS = 24  # fewest registers that a thread may have


@dataclasses.dataclass(frozen=True)
class AttentionTuning:
    """How paged attention divides its work.

    Attributes:
      block: context slots processed in one step.
      stages: blocks in flight (depth of the shared-memory ring).
      warpgroups: compute warpgroups of a CTA for each of its KV heads; they read the same keys and
        values.
      heads: KV heads of a CTA.
      splits: CTAs that share one context.
      ping_pong: two warpgroups alternate: one has the tensor cores while the other computes its
        softmax (ping-pong scheduling of FlashAttention-3, arXiv 2407.08608).
      byte_stages: blocks of bytes in flight, before they are widened; for 8-bit pages.
      registers: registers of a compute thread, taken from the producer warpgroup; None: as
        compiled.

    Raises ValueError for ``ping_pong`` without exactly two warpgroups of one head, and for more
    registers than a CTA has: its threads would wait for them forever.
    """

    block: int
    stages: int
    warpgroups: int = 1
    heads: int = 1
    splits: int = 1
    ping_pong: bool = False
    byte_stages: int = 0
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.ping_pong and (self.warpgroups, self.heads) != (2, 1):
            raise ValueError("ping_pong needs two warpgroups of one head")
        if self.registers is not None and self.producer_registers < MIN_REGISTERS:
            raise ValueError(
                f"{self.registers} registers in each of {self.consumers} compute warpgroups leave "
                f"{self.producer_registers} to the producer: it needs {MIN_REGISTERS}"
            )

    @property
    def consumers(self) -> int:
        """Compute warpgroups of a CTA."""
        return self.warpgroups * self.heads

    @property
    def producer_registers(self) -> int:
        """Registers that the compute warpgroups leave to each thread of the producer."""
        groups = self.consumers + 1
        launched = REGISTERS // (128 * groups) // 8 * 8  # of each thread at launch, in steps of 8
        return groups * launched - self.consumers * (self.registers or launched)


def attention_tuning(
    batch: int, kv_heads: int, row_tiles: int, slots: int, page_size: int
) -> AttentionTuning:
    """The tuning for a call.

    The work consists of ``batch * kv_heads`` pairs of a sequence and a KV head, each with
    ``row_tiles`` tiles of 64 query rows. ``slots`` is the longest context that the page table can
    hold.

    Measured on an H100 with 32 query heads and 8 KV heads, in us. Each line gives sequences x
    context, the number of queries, the time of the choice, and the times of alternatives. All were
    measured without ping-pong scheduling, except the line that compares it.

    - 8 x 8k, 8: 98 with 2 splits of 128-slot blocks; 100 with 64-slot blocks; 101 without splits.
    - 8 x 1k, 1: 18.7 without splits; 18.9 with 2. 8 x 640, 1: 13.0 with 2 stages; 14.3 with 5.
    - 1 x 1k, 6: 9.9 with 8 splits; 11.1 with 4. 1 x 8k, 8: 19.7 with 128-slot blocks; 21.7 with 64.
    - 1 x 1k, 60: 16.5 with 4 splits of 64-slot blocks; 19.8 with 128; 31 with 8 splits (two waves).
    - 8 x 8k, 64: 143 without splits; 205 with 2.
    - Ping-pong: 8 x 8k, 64: 132.7, without 136.0; with pages of 16 slots 145.3, without 141.9.
      1 x 3.5k, 512: 62.4, without 67.4. 1 x 8k, 64: 39.1, without 41.5. 1 x 1k, 60: 16.8, without
      16.6.
    - 32 x 640, 6: 37.8 with two heads a CTA; 39.9 with one; 42.7 with one and 5 stages.
    """
    pairs = batch * kv_heads
    if row_tiles > 1:
        splits = _splits(pairs * -(-row_tiles // 2), slots // 256)
        if splits > 1 and slots // splits < LONG_SPLIT:
            return AttentionTuning(block=64, stages=2, warpgroups=2, splits=splits)
        return AttentionTuning(
            block=128,
            stages=2,
            warpgroups=2,
            splits=splits,
            ping_pong=page_size >= 64,  # smaller pages load too slowly for it
            registers=240,
        )
    if pairs > MULTIPROCESSORS and kv_heads % 2 == 0:
        return AttentionTuning(block=64, stages=2, heads=2)
    splits = _splits(pairs, slots // (1024 if 4 * pairs > MULTIPROCESSORS else 128))
    if splits == 1:
        return AttentionTuning(block=64, stages=2)
    if slots // splits < LONG_SPLIT:
        return AttentionTuning(block=64, stages=5, splits=splits)
    return AttentionTuning(block=128, stages=2, splits=splits)


def float8_tuning(
    batch: int, kv_heads: int, row_tiles: int, slots: int, page_size: int
) -> AttentionTuning:
    """The tuning for a call with 8-bit pages, as ``attention_tuning``.

    Rings of bytes and of what they become share the memory. The producer widens numbers: it keeps
    its registers, and there is no ping-pong scheduling. A compute warpgroup needs about as long for
    a block as its copy, so a multiprocessor should have two of them. A CTA of two heads has; its
    rings then have room for one widened block.

    - 32 x 640, 1: 22.9 with two heads a CTA; 27.6 with one. 6: 24.0; 29.4. 16 x 640, 1: 14.8 with
      one; 21.3 with two.
    - 32 x 4k, 1: 104.4 with two heads a CTA; 107.2 with one and 128-slot blocks.
    - 8 x 640, 1: 12.1 with 2 splits; 14.3 without. 8 x 8k, 1: 54.4 with 2 splits of 128-slot
      blocks; 65.3 of 64-slot blocks. 1 x 8k, 8: 19.7 with 128-slot blocks; 21.2 with 64.
    - 8 x 640, 64: 21.4 with 2 blocks of bytes in flight; 21.8 with 4.
    """
    pairs = batch * kv_heads
    if row_tiles > 1:
        splits = _splits(pairs * -(-row_tiles // 2), slots // 256)
        return AttentionTuning(block=64, stages=2, byte_stages=2, warpgroups=2, splits=splits)
    if pairs > MULTIPROCESSORS and kv_heads % 2 == 0:
        return AttentionTuning(block=64, stages=1, byte_stages=2, heads=2)
    splits = _splits(pairs, slots // 128)
    block = 64 if slots // splits < LONG_SPLIT else 128
    return AttentionTuning(block=block, stages=2, byte_stages=2, splits=splits)


def _splits(blocks: int, most: int) -> int:
    """Splits of each context: as many as give no multiprocessor a second CTA, at most 8.

    The CTAs of a cluster must lie in one of the GPU's groups of multiprocessors, so clusters of 4
    and more cannot use them all (128 CTAs in clusters of 8, or of 4, ran in two waves).
    """
    return largest_fitting(
        lambda splits: (
            splits <= most
            and splits * blocks <= (MULTIPROCESSORS if splits == 2 else MULTIPROCESSORS // 2)
        )
    )
