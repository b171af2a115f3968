"""What the scheduler and the engine say to each other."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from jaxspec.config.cache import pages_for
from jaxspec.config.engine import Preemption
from jaxspec.scheduling.sequence import Sequence


class QueueFull(Exception):
    """The queue has as many requests as it may have: try again later."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can hold, and how it schedules.

    Raises ValueError for snapshots and a drafter that reads several cached tokens again.

    Attributes:
      num_rows: rows of all shards together, the same number in each.
      num_pages: pages of each shard, the null page not counted.
      max_length: most tokens of a sequence, prompt included.
      scratch_slots: slots that a draft tree needs past the context.
      tokens_per_round: most tokens that a round commits.
      prefill_budget: most prompt tokens that a plan reads, of all rows together, beside the drafts
        that it verifies.
      largest_read: most prompt tokens of a row that a plan reads; None: any number.
      largest_verified: the same of tokens that a plan verifies. What comes after the end of a draft
        is read for nothing.
      verified_rows: rows of a shard that a plan verifies at most.
      least_read: fewest of a row that wants more, so that a small budget is not cut to shreds; the
        rows that get none wait for another plan.
      max_rounds: most rounds of a call.
      runs_all_rounds: a call runs all its rounds, even if every row ends before.
      crowded_rows: rows of a call for which the host needs as long as the device for a round; None:
        any number is quicker. A call of so many has several rounds, even while others read or
        wait, or have shown no round yet: else the device would wait for the host.
      unseen_rounds: most rounds of a call most of whose rows have shown no round yet; None: any.
        What such rows accept is not known, so an adaptive engine may choose the wrong tree.
      undrafted_rows: rows that run or wait from which drafting never pays, so that plans should
        leave the drafter out; None: it may pay with any number.
      max_queue: most requests that may wait; None: any number.
      watermark: share of a shard's pages that an admission leaves available for running sequences.
      prefix_caching: whether requests use the pages of earlier ones.
      share_generated: whether these may hold generated tokens, too.
      share_pages: whether a request may begin with pages of another, cached or running. Not where
        rows keep what is in no page: then prefix caching needs snapshots, too.
      prefix_tokens_read_again: last tokens of a cached prefix that are read once more (see
        Drafter.num_reread_tokens).
      snapshots: most copies of what rows keep outside of pages; None: they keep nothing there.
        Prefix hits are rounded down to such copies.
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
    largest_verified: int = 64
    verified_rows: int = 32
    least_read: int = 1
    max_rounds: int = 16
    runs_all_rounds: bool = False
    crowded_rows: int | None = None
    unseen_rounds: int | None = None
    undrafted_rows: int | None = None
    max_queue: int | None = None
    watermark: float = 0.01
    prefix_caching: bool = True
    share_generated: bool = True
    share_pages: bool = True
    prefix_tokens_read_again: int = 1
    snapshots: int | None = None
    preemption: Preemption = "auto"
    part_pages: int = 1
    host_parts: int | None = None
    swaps_only: bool = False

    def __post_init__(self):
        if self.snapshots is not None and self.prefix_tokens_read_again > 1:
            raise ValueError(
                f"a drafter that reads the last {self.prefix_tokens_read_again} tokens of a cached "
                "prefix again has no snapshots for it: use another one, or set prefix_caching=False"
            )

    def most_tokens(self, prompt_tokens: int, max_tokens: int) -> int:
        """Most tokens that a request can have, its prompt included."""
        return min(prompt_tokens + max_tokens, self.max_length)

    def check(self, request_id: str, prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError if there can never be pages for a request of so many tokens."""
        most = self.most_tokens(prompt_tokens, max_tokens)
        needed = pages_for(most + self.scratch_slots, self.page_size)
        if needed > self.num_pages:
            raise ValueError(
                f"request {request_id!r}: {most} tokens and a tree of {self.scratch_slots} slots "
                f"need {needed} pages of {self.page_size}, there are {self.num_pages}: shorten the "
                "prompt or max_tokens, shrink the tree, or raise num_pages"
            )


class SwapOut(NamedTuple):
    """Copy a row, and the content of these pages in order, to host memory.

    The row's table on the device may still name other pages of the same content.
    """

    row: int
    sequence: Sequence
    pages: tuple[int, ...]


class SwapIn(NamedTuple):
    """Put a swapped sequence back, its first pages into the first ``restored`` that it holds."""

    sequence: Sequence
    restored: int


class PageCopy(NamedTuple):
    """Copy one page of a shard to another."""

    shard: int
    source: int
    destination: int


class Admission(NamedTuple):
    """Give its row to a sequence, which reads ``sequence.tokens`` as its prompt.

    Its pages hold the KV of the first ``cached`` tokens. Reading starts at the last of them (see
    ``Limits.prefix_tokens_read_again``), whose KV is not written again. ``snapshot``: slot of what
    the row keeps outside of pages, before that token; None: nothing yet.
    """

    sequence: Sequence
    cached: int
    snapshot: int | None = None


@dataclasses.dataclass(frozen=True)
class Read:
    """Read a row's next ``count`` prompt tokens."""

    row: int
    count: int


class Verify(NamedTuple):
    """Read a row's next ``count`` tokens, of which all but the first are a draft, and keep what the
    target writes. The first is the last of its ``given`` tokens."""

    row: int
    count: int
    given: int


class Snapshot(NamedTuple):
    """Copy what a row keeps outside of pages to a slot, once it has read."""

    row: int
    slot: int


class Flight(NamedTuple):
    """What a plan's calls do to a sequence.

    Attributes:
      read: prompt tokens that are read afterwards.
      least, most: tokens that are added, unless it ends.
      verifies: they are those of a draft that are kept, and perhaps one more.
    """

    sequence: Sequence
    read: int
    least: int
    most: int
    verifies: bool = False

    def land(self) -> None:
        """The calls are in flight no more."""
        self.sequence.flights -= 1
        self.sequence.least -= self.least
        self.sequence.most -= self.most

    def stood_still(self, result: "RowResult") -> bool:
        """Whether nothing came, because its row had paused."""
        return bool(self.least) and not result.tokens and not result.ended


@dataclasses.dataclass
class Plan:
    """What the device does next, in the order of the fields from ``swap_out`` on.

    Sequences go on changing: use what a plan says of them before the next call to the scheduler.

    Attributes:
      timed_out: request ids whose deadline has passed since the last plan.
      dropped: request ids whose swapped copy is no longer needed.
      catch_up: rows that are done, whose drafter reads its pending tokens, since their pages become
        known to the prefix cache.
      release: rows that become empty.
      tables: sequences whose rows have new pages.
      decode_rows: rows that decode, those included that finish reading in this plan.
      rounds: rounds of the decode call.
      resumed: sequences whose rows are done, and go on.
      masked_rows: further rows that decode: one round, whose tokens the host restricts.
      undrafted: its rows are unread: the drafter need read nothing, and drafts nothing.
      sequences: the sequence of each row that reads or decodes; ``flights``: what happens to it.
    """

    index: int
    timed_out: list[str] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    swap_out: list[SwapOut] = dataclasses.field(default_factory=list)
    catch_up: list[int] = dataclasses.field(default_factory=list)
    release: list[int] = dataclasses.field(default_factory=list)
    swap_in: list[SwapIn] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    admissions: list[Admission] = dataclasses.field(default_factory=list)
    tables: list[Sequence] = dataclasses.field(default_factory=list)
    reads: list[Read] = dataclasses.field(default_factory=list)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    verifies: list[Verify] = dataclasses.field(default_factory=list)
    resumed: list[Sequence] = dataclasses.field(default_factory=list)
    decode_rows: list[int] = dataclasses.field(default_factory=list)
    rounds: int = 0
    masked_rows: list[int] = dataclasses.field(default_factory=list)
    undrafted: bool = False
    sequences: dict[int, Sequence] = dataclasses.field(default_factory=dict)
    flights: dict[int, Flight] = dataclasses.field(default_factory=dict)

    def add_verifies(self, shards: Iterable[Iterable[Sequence]], limits: Limits) -> None:
        """Verify drafts of running sequences, of each shard, that have read the rest.

        A call computes as many tokens of as many rows, however few it is given. So each row gets
        all that fit; and where no shard has enough rows for a full call, the next one waits for
        that in flight, to have the rows of both. The longest drafts come first, lest a few of them
        are left at the end, but never before the earliest request's.
        """
        most, shards = limits.verified_rows, [list(shard) for shard in shards]
        ready = [[each for each in shard if each.left_to_verify] for shard in shards]
        is_full = any(len(shard) >= most for shard in ready)
        if not is_full and any(each.verifying for shard in shards for each in shard):
            return
        for shard in ready:
            shard.sort(key=lambda each: each.order)
            longest = sorted(shard[1:], key=lambda each: each.left_to_verify, reverse=True)
            for sequence in [*shard[:1], *longest][:most]:
                count = min(sequence.left_to_verify, limits.largest_verified)
                self.verifies.append(Verify(sequence.row, count, sequence.goal))
                self.add_flight(sequence, 0, count)
                self.flights[sequence.row] = self.flights[sequence.row]._replace(verifies=True)
                sequence.verifying = True

    def add_flight(self, sequence: Sequence, least: int, most: int) -> None:
        """Note that a call of this plan adds so many tokens to a sequence."""
        earlier = self.flights.get(sequence.row)
        if earlier is None:
            sequence.flights += 1
            earlier = Flight(sequence, sequence.read, 0, 0)
            self.sequences[sequence.row] = sequence
        self.flights[sequence.row] = earlier._replace(
            least=earlier.least + least, most=earlier.most + most
        )
        sequence.least += least
        sequence.most += most

    def check(self, results: Iterable["RowResult"]) -> None:
        """Raise ValueError for results that this plan's calls cannot have."""
        for result in results:
            most = self.flights[result.row].most if result.row in self.flights else 0
            if len(result.tokens) > most:
                raise ValueError(
                    f"row {result.row} emitted {len(result.tokens)} tokens, planned were at most "
                    f"{most}"
                )

    @property
    def runs_model(self) -> bool:
        """Whether rows read or decode, so that ``update`` must be told what they emitted."""
        return bool(self.reads or self.verifies or self.decode_rows or self.masked_rows)


class RowResult(NamedTuple):
    """What a row did in a plan's calls.

    Attributes:
      tokens: new tokens, in order.
      pending: tokens at the end of its context whose draft KV is not yet written (the root is not
        part of the context).
      ended: why the row is done; None: it is not.
      failed: whether it ended by an error: then the prefix cache learns nothing of it.
      pause: it is done, but must go on: whether the host restricts its tokens from there; None: it
        is not.
      reads_on: whether it has not read all: its prompt, or a draft that it keeps.
    """

    row: int
    tokens: tuple[int, ...] = ()
    pending: int = 0
    ended: str | None = None
    failed: bool = False
    pause: bool | None = None
    reads_on: bool = False


class Delivery(NamedTuple):
    """New tokens of a request. ``ended``: why it has ended, or None."""

    request_id: str
    tokens: tuple[int, ...]
    ended: str | None
