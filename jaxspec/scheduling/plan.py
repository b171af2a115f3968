"""What the scheduler and the engine say to each other."""

import dataclasses
from collections.abc import Mapping

from jaxspec.config.cache import pages_for
from jaxspec.config.checks import check_count, is_integer
from jaxspec.config.engine import Preemption
from jaxspec.scheduling.sequence import Request, Sequence


class QueueFull(Exception):
    """The queue has as many requests as it may have: try again later."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the engine has room for.

    Attributes:
      num_rows: rows of all shards together, the same number in each.
      num_pages: pages of each shard, the null page not counted.
      max_length: most tokens of a sequence, prompt included.
      scratch_slots: slots that a draft tree needs past the context.
      tokens_per_round: most tokens that a round commits.
      prefill_budget: most prompt tokens that a plan reads, of all rows together.
      largest_read: most prompt tokens of a row that a plan reads; None: any number.
      max_rounds: most rounds of a call.
      runs_all_rounds: a call runs all its rounds, even if every row ends before.
      masked_rounds: most rounds of a call beside masked rows, which run one.
      waiting_rounds: most rounds of a call while a request waits for a row or for pages.
      unseen_rounds: most rounds of a call most of whose rows have shown no round yet; None: any.
        What such rows accept is not known, so an adaptive engine may choose the wrong tree.
      max_queue: most requests that may wait; None: any number.
      watermark: share of a shard's pages that an admission leaves available for running sequences.
      prefix_caching: whether requests use the pages of earlier ones.
      share_generated: whether these may hold generated tokens, too.
      share_pages: whether a request may begin with pages of another, cached or running. Not where
        rows keep what is in no page: then prefix caching needs snapshots, too.
      reread: last tokens of a cached prefix that are read once more (see Drafter.reread).
      snapshots: copies of what rows keep outside of pages that there is room for; None: they keep
        nothing there. Prefix hits are rounded down to such copies.
      preemption: "auto" takes what PreemptionCosts say is cheaper. Who does not fit host memory, or
        is still reading its prompt, is recomputed.
      part_pages: pages that are moved to host memory at a time.
      host_parts: most such parts in host memory; None: any number.
      swaps_only: what was generated is never recomputed: only so many run that host memory holds
        all who may have to go (see HostMemory.never_lacks).
    """

    num_rows: int
    num_pages: int
    page_size: int
    max_length: int
    scratch_slots: int
    tokens_per_round: int
    shards: int = 1
    prefill_budget: int = 2048
    largest_read: int | None = None
    max_rounds: int = 16
    runs_all_rounds: bool = False
    masked_rounds: int = 8
    waiting_rounds: int = 1
    unseen_rounds: int | None = None
    max_queue: int | None = None
    watermark: float = 0.01
    prefix_caching: bool = True
    share_generated: bool = True
    share_pages: bool = True
    reread: int = 1
    snapshots: int | None = None
    preemption: Preemption = "auto"
    part_pages: int = 1
    host_parts: int | None = None
    swaps_only: bool = False

    def __post_init__(self):
        """Raises ValueError for values that no scheduler can work with."""
        for name in ("num_rows", "num_pages", "page_size", "max_length", "tokens_per_round"):
            check_count(name, getattr(self, name))
        check_count("reread", self.reread)
        for name in ("shards", "max_rounds", "masked_rounds", "waiting_rounds", "part_pages"):
            check_count(name, getattr(self, name))
        for name in ("scratch_slots", "host_parts", "snapshots"):
            value = getattr(self, name)
            is_none = value is None and name != "scratch_slots"
            if not (is_none or (is_integer(value) and value >= 0)):
                raise ValueError(f"{name} must be an integer, at least 0, got {value!r}")
        if self.num_rows % self.shards:
            raise ValueError(f"num_rows={self.num_rows} must be a multiple of shards={self.shards}")
        if self.prefill_budget < self.num_rows:
            raise ValueError(
                f"prefill_budget must be at least num_rows={self.num_rows}, so that every reading "
                f"row gets a token, got {self.prefill_budget}"
            )
        for name in ("max_queue", "largest_read", "unseen_rounds"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be a share in [0, 1), got {self.watermark}")
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ValueError(
                f'preemption must be "auto", "recompute" or "swap", got {self.preemption!r}'
            )
        if self.snapshots is not None and (self.shards > 1 or self.share_pages):
            raise ValueError("snapshots need one shard, and share_pages=False")
        if self.snapshots is not None and self.reread > 1:
            raise ValueError(
                f"a drafter that reads the last {self.reread} tokens of a cached prefix again has "
                "no snapshots for it: use another one, or set prefix_caching=False"
            )
        if self.swaps_only and (self.preemption != "swap" or self.shards > 1):
            raise ValueError('swaps_only needs preemption="swap", and one shard')

    def check(self, request: Request) -> int:
        """Most tokens that the request can have. Raises ValueError if it can never run."""
        name, length = f"request {request.request_id!r}", len(request.prompt)
        if not request.prompt:
            raise ValueError(f"{name}: the prompt is empty: give at least one token")
        check_count("max_tokens", request.max_tokens)
        if length >= self.max_length:
            raise ValueError(
                f"{name}: the prompt has {length} tokens; with those generated at most "
                f"{self.max_length} fit: shorten it, or raise max_length"
            )
        most = min(length + request.max_tokens, self.max_length)
        needed = pages_for(most + self.scratch_slots, self.page_size)
        if needed > self.num_pages:
            raise ValueError(
                f"{name}: {most} tokens and a tree of {self.scratch_slots} slots need {needed} "
                f"pages of {self.page_size}, there are {self.num_pages}: shorten the prompt or "
                "max_tokens, shrink the tree, or raise num_pages"
            )
        return most


@dataclasses.dataclass(frozen=True)
class Ended:
    """A request that the scheduler ended: "cancelled", "timeout", or as ``cancel`` was told."""

    request_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class SwapOut:
    """Copy a row, and the content of these pages in order, to host memory.

    The row's table on the device may still name other pages of the same content.
    """

    row: int
    sequence: Sequence
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SwapIn:
    """Put a swapped row back, and its first pages into the first ``restored`` of its table."""

    row: int
    sequence: Sequence
    restored: int
    table: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PageCopy:
    """Copy one page of a shard to another."""

    shard: int
    source: int
    destination: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """Give a row to a sequence, which reads ``sequence.tokens`` as its prompt.

    The table holds the KV of the first ``cached`` tokens. Reading starts at the last of them
    (``Limits.reread``), whose KV is not written again. ``snapshot``: slot of what the row keeps
    outside of pages, before that token; None: nothing yet.
    """

    row: int
    sequence: Sequence
    cached: int
    table: tuple[int, ...]
    snapshot: int | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A row's new page table."""

    row: int
    table: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Read:
    """Read a row's next ``count`` prompt tokens."""

    row: int
    count: int


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copy what a row keeps outside of pages to a slot, once it has read."""

    row: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the device does next, in the order of the fields from ``swap_out`` on.

    Sequences go on changing: use what a plan says of them before the next call to the scheduler.

    Attributes:
      ended: requests that the scheduler ended since the last plan.
      dropped: request ids whose swapped copy is no longer needed.
      settle: rows that are done, whose drafter reads its pending tokens, since their pages become
        known to the prefix cache.
      release: rows that become empty.
      decode_rows: rows that decode, those included that finish reading in this plan.
      rounds: rounds of the decode call.
      masked_rows: further rows that decode: one round, whose tokens the host restricts.
      sequences: the sequence of each row that reads or decodes.
    """

    index: int
    ended: tuple[Ended, ...] = ()
    dropped: tuple[str, ...] = ()
    swap_out: tuple[SwapOut, ...] = ()
    settle: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    swap_in: tuple[SwapIn, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    admissions: tuple[Admission, ...] = ()
    tables: tuple[Table, ...] = ()
    reads: tuple[Read, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    decode_rows: tuple[int, ...] = ()
    rounds: int = 0
    masked_rows: tuple[int, ...] = ()
    sequences: Mapping[int, Sequence] = dataclasses.field(default_factory=dict)

    @property
    def calls(self) -> bool:
        """Whether rows read or decode, so that ``update`` must be told what they emitted."""
        return bool(self.reads or self.decode_rows or self.masked_rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do for the device. ``ended`` and ``dropped`` may be set."""
        steps = (self.swap_out, self.settle, self.release, self.swap_in, self.copies)
        return not (any(steps) or self.admissions or self.tables or self.calls)


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What a row did in a plan's calls.

    Attributes:
      tokens: new tokens, in order.
      pending: tokens at the end of its context whose draft KV is not yet written (the root is not
        part of the context).
      ended: why the row is done; None: it is not.
      failed: whether it ended by an error: then the prefix cache learns nothing of it.
    """

    row: int
    tokens: tuple[int, ...] = ()
    pending: int = 0
    ended: str | None = None
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class Delivery:
    """New tokens of a request. ``ended``: why it has ended, or None."""

    request_id: str
    tokens: tuple[int, ...]
    ended: str | None
