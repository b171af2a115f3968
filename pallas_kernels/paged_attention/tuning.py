"""How the paged attention kernel divides its work, measured on an H100."""

import dataclasses

from pallas_kernels.h100 import MULTIPROCESSORS, largest_fitting

ROWS = 64  # query rows of one warpgroup matrix product (wgmma)
LONG_SPLIT = 1024  # context slots from which a split uses 128-slot blocks
LONG_PARTS, LEAST_PART = 8192, 512  # slots of contexts that are read in parts, and least of a part
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
      splits: CTAs of a cluster that share one context, and merge their parts of its softmax.
      parts: of a context, each a CTA's; XLA merges them. Unlike splits there may be any number, but
        it takes a launch more.
      ping_pong: two warpgroups alternate: one has the tensor cores while the other computes its
        softmax (ping-pong scheduling of FlashAttention-3, arXiv 2407.08608).
      byte_stages: blocks of bytes in flight, before they are widened; for 8-bit pages.
      registers: registers of a compute thread, taken from the producer warpgroup; None: as
        compiled.

    Raises ValueError for ``ping_pong`` without exactly two warpgroups of one head, for ``parts``
    beside ``splits``, and for more registers than a CTA has: its threads would wait for them for
    ever.
    """

    block: int
    stages: int
    warpgroups: int = 1
    heads: int = 1
    splits: int = 1
    parts: int = 1
    ping_pong: bool = False
    byte_stages: int = 0
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.ping_pong and (self.warpgroups, self.heads) != (2, 1):
            raise ValueError("ping_pong needs two warpgroups of one head")
        if self.parts > 1 and self.splits > 1:
            raise ValueError(f"{self.parts} parts and {self.splits} splits: one of them must be 1")
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

    Measured on an H100: docs/results/kernels.md has the times of the choices and of alternatives.
    """
    pairs = batch * kv_heads
    if row_tiles > 1:
        blocks = pairs * -(-row_tiles // 2)
        splits = _splits(blocks, slots // 256)
        if splits > 1 and slots // splits < LONG_SPLIT:
            return AttentionTuning(block=64, stages=2, warpgroups=2, splits=splits)
        config = AttentionTuning(
            block=128,
            stages=2,
            warpgroups=2,
            splits=splits,
            ping_pong=page_size >= 64,  # smaller pages load too slowly for it
            registers=240,
        )
        return _spread(config, blocks, slots)
    if pairs > MULTIPROCESSORS and kv_heads % 2 == 0:
        return AttentionTuning(block=64, stages=2, heads=2)
    splits = _splits(pairs, slots // (1024 if 4 * pairs > MULTIPROCESSORS else 128))
    if splits == 1:
        return AttentionTuning(block=64, stages=2)
    if slots // splits < LONG_SPLIT:
        return AttentionTuning(block=64, stages=5, splits=splits)
    return _spread(AttentionTuning(block=128, stages=2, splits=splits), pairs, slots)


def float8_tuning(
    batch: int, kv_heads: int, row_tiles: int, slots: int, page_size: int
) -> AttentionTuning:
    """The tuning for a call with 8-bit pages, as ``attention_tuning``.

    Rings of bytes and of what they become share the memory. The producer widens numbers: it keeps
    its registers, and there is no ping-pong scheduling. A compute warpgroup needs about as long for
    a block as its copy, so a multiprocessor should have two of them. A CTA of two heads has; its
    rings then hold one widened block.
    """
    pairs = batch * kv_heads
    config = AttentionTuning(block=64, stages=2, byte_stages=2)
    if row_tiles > 1:
        blocks = pairs * -(-row_tiles // 2)
        splits = _splits(blocks, slots // 256)
        config = dataclasses.replace(config, warpgroups=2, splits=splits)
        return _spread(config, blocks, slots)
    if pairs > MULTIPROCESSORS and kv_heads % 2 == 0:
        return dataclasses.replace(config, stages=1, heads=2)
    splits = _splits(pairs, slots // 128)
    block = 64 if slots // splits < LONG_SPLIT else 128
    return _spread(dataclasses.replace(config, block=block, splits=splits), pairs, slots)


def large_head_tuning(
    batch: int, kv_heads: int, row_tiles: int, slots: int, page_size: int
) -> AttentionTuning:
    """The tuning for heads of 256, as ``attention_tuning``: two blocks of 64 slots fill the memory.

    Not yet timed.
    """
    config, pairs = AttentionTuning(block=64, stages=2), batch * kv_heads
    if row_tiles > 1:
        config = dataclasses.replace(config, warpgroups=2, registers=240)
        return _shared(config, pairs * -(-row_tiles // 2), slots)
    return _shared(config, pairs, slots)


def large_head_float8_tuning(
    batch: int, kv_heads: int, row_tiles: int, slots: int, page_size: int
) -> AttentionTuning:
    """``large_head_tuning`` with 8-bit pages: who widens them needs registers, so that there are
    none for a second warpgroup."""
    config = AttentionTuning(block=64, stages=2, byte_stages=2)
    return _shared(config, batch * kv_heads * row_tiles, slots)


def _shared(config: AttentionTuning, blocks: int, slots: int) -> AttentionTuning:
    """With contexts shared by the CTAs of clusters, or long ones in parts."""
    splits = _splits(blocks, slots // 128)
    return _spread(dataclasses.replace(config, splits=splits), blocks, slots)


def _spread(config: AttentionTuning, blocks: int, slots: int) -> AttentionTuning:
    """With long contexts in parts, where that puts at least half as many CTAs more to work than
    clusters do: those of 4 and 8 leave about half of the multiprocessors idle."""
    parts = min(MULTIPROCESSORS // blocks, slots // LEAST_PART)
    if slots < LONG_PARTS or 2 * parts < 3 * config.splits:
        return config
    return dataclasses.replace(config, splits=1, parts=parts)


def of_parts(config: AttentionTuning) -> AttentionTuning:
    """The tuning for parts of pages with heads of 256, whose rows leave as float32: memory holds
    those of one warpgroup."""
    return dataclasses.replace(config, warpgroups=1, parts=1, registers=None)


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
