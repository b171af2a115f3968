"""Rows and pages of one data shard, and the sequences that hold them."""

import dataclasses
import heapq
import math
from collections.abc import Iterable

from jaxspec.config.cache import pages_for
from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.plan import Limits, PageCopy
from jaxspec.scheduling.prefix_cache import Node, PrefixCache
from jaxspec.scheduling.sequence import Sequence, State
from jaxspec.scheduling.snapshots import Snapshots


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a waiting sequence would start in a shard.

    Attributes:
      cached: tokens whose KV it finds there.
      chain: known pages that it shares.
      known: tokens of known pages; more than are cached where no snapshot reaches as far.
      source: a sibling whose prompt it shares instead, the partly filled page included.
    """

    shard: "Shard"
    cached: int
    chain: list[Node]
    known: int = 0
    source: Sequence | None = None

    @property
    def shared(self) -> list[int]:
        """Pages that it would share."""
        if self.source is not None:
            return self.source.pages[: self.cached // self.shard.page_size]
        return [node.page for node in self.chain]


class Shard:
    """Rows ``index * n .. (index + 1) * n - 1``, and pages which are numbered in each shard."""

    def __init__(self, index: int, limits: Limits):
        num_rows = limits.num_rows // limits.shards
        self.index = index
        self.limits = limits
        self.page_size = limits.page_size
        self.cache = PrefixCache(limits.page_size)
        self.pages = PageAllocator(limits.num_pages, on_evict=self._forget)
        has_copies = limits.prefix_caching and limits.snapshots is not None
        self.snapshots = Snapshots(limits.snapshots or 0) if has_copies else None
        self.free_rows = list(range(index * num_rows, (index + 1) * num_rows))  # a heap
        self.running: list[Sequence] = []
        self._spare_pages = math.ceil(limits.watermark * limits.num_pages)

    def tables(self) -> tuple[PageAllocator, list[tuple[list[int], int]]]:
        """Its pages, and those of each running sequence with the tokens that are known of it."""
        return self.pages, [(each.pages, len(each.tokens)) for each in self.running]

    def placement(self, sequence: Sequence) -> Placement:
        """Where the sequence would start: with the most tokens that it can share."""
        if sequence.swapped or sequence.request.reads_all:
            return Placement(self, 0, [])
        source = self._sibling(sequence)
        if source is not None:
            unread = source.state is not State.DECODING  # a draft is verified with the last token
            return Placement(self, sequence.prompt_length - unread, [], source=source)
        if not self.limits.prefix_caching:
            return Placement(self, 0, [])
        chain = self.cache.match(sequence.tokens, sequence.namespace)
        known = len(chain) * self.page_size
        if self.snapshots is not None:
            chain = self.snapshots.covered(chain)
        return Placement(self, len(chain) * self.page_size, chain, known)

    def should_wait(self, placement: Placement, sequence: Sequence) -> bool:
        """Whether it could share more once running rows have read what they are reading."""
        if sequence.swapped or sequence.request.reads_all or placement.source is not None:
            return False
        if any(self._is_sibling(sequence, other) for other in self._reading()):
            return True
        return self.limits.prefix_caching and any(
            self._shareable(sequence, other) > placement.cached for other in self._reading()
        )

    def fits(self, placement: Placement, sequence: Sequence) -> bool:
        """Whether there are pages for it to read and to decode one round.

        If other sequences run, the watermark stays available for them.
        """
        shared = placement.shared
        needed = self._pages_needed(sequence, 1) - len(shared)
        needed += self._spare_pages if self.running else 0

        def enough() -> bool:
            return self.pages.available - self.pages.num_idle_of(shared) >= needed

        if not enough():
            self._trim()
        return enough()

    def place(self, placement: Placement, sequence: Sequence) -> PageCopy | None:
        """Give it a row and pages. Returns the page that must be copied for it, if any."""
        table = placement.shared
        if placement.source is None:
            partial = 0
            self.pages.share(table)
            sequence.chain = list(placement.chain)
        else:
            held = placement.source.pages
            table, partial = self.pages.fork(held, placement.cached, self.page_size)
            sequence.chain = placement.source.chain[: len(table)]
        fresh = self.pages.allocate(self._pages_needed(sequence, 1) - len(table))
        sequence.pages = table + fresh
        sequence.row = heapq.heappop(self.free_rows)
        self.running.append(sequence)
        return PageCopy(self.index, partial, fresh[0]) if partial else None

    def leave(self, sequence: Sequence) -> None:
        """Take its row and pages back."""
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        heapq.heappush(self.free_rows, sequence.row)
        if self.snapshots is not None:
            self.snapshots.give_back(sequence.snapshots.values())
        sequence.row, sequence.pages, sequence.chain, sequence.snapshots = -1, [], [], {}
        sequence.table_changed = False

    def grow(self, sequence: Sequence, rounds: int) -> bool:
        """Extend its pages for a call of so many rounds, if enough are available."""
        missing = self.missing(sequence, rounds)
        if missing > self.pages.available:
            self._trim()
            missing = self.missing(sequence, rounds)
        if missing > self.pages.available:
            return False
        if missing:
            sequence.pages += self.pages.allocate(missing)
            sequence.table_changed = True
        return True

    def missing(self, sequence: Sequence, rounds: int) -> int:
        """Pages that it lacks for a call of so many rounds."""
        return max(0, self._pages_needed(sequence, rounds) - len(sequence.pages))

    def lacks(self, sequences: Iterable[Sequence], rounds: int) -> bool:
        """Whether there are too few pages for a call of so many rounds of these sequences."""
        return sum(self.missing(each, rounds) for each in sequences) > self.pages.available

    def complete(self, sequence: Sequence, context: int, pending: int) -> None:
        """Note that a sequence has so many tokens with KV, and its drafter lacks the last ones."""
        complete = max(sequence.num_complete_tokens, context - pending)
        sequence.num_complete_tokens = complete
        self.register(sequence)
        missing = self.full_pages(sequence, context) - len(sequence.chain)
        sequence.needs_drafter_catch_up = self.limits.prefix_caching and missing > 0

    def register(self, sequence: Sequence) -> None:
        """Make its complete full pages known to the prefix cache.

        Where the cache knows the same tokens already, the sequence takes over the known page: its
        table then always holds the whole chain.
        """
        if not self.limits.prefix_caching:
            return
        size, chain = self.page_size, sequence.chain
        for index in range(len(chain), self.full_pages(sequence, sequence.num_complete_tokens)):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            page = sequence.pages[index]
            node = self.cache.insert(chain, sequence.namespace, tokens, page)
            if node.page == page:
                self.pages.keep(page)
            else:
                self.pages.share([node.page])
                self.pages.release([page])
                sequence.pages[index] = node.page
                sequence.table_changed = True
            chain.append(node)
            slot = sequence.snapshots.pop(len(chain) * size, None)
            if self.snapshots is not None and slot is not None:
                self.snapshots.attach(node, slot)

    def snapshot_for(self, placement: Placement) -> int | None:
        """Slot of the snapshot that a placed sequence begins with."""
        if self.snapshots is None or not placement.chain:
            return None
        return self.snapshots.use(placement.chain[-1])

    def read_end(self, sequence: Sequence, most: int) -> int:
        """Where a read of at most so many tokens of its prompt ends: where a snapshot is of use.

        That is before the last token of a page (see Snapshots): of the page where it leaves what
        the prefix cache knows, of its last full page, or else of the last one that it reaches.
        """
        size, first, end = self.page_size, sequence.read, sequence.read + most
        if self.snapshots is None:
            return end
        for tokens in sorted((sequence.branch, self._last_full(sequence))):
            if first < tokens - 1 <= end:
                return tokens - 1
        last = (end + 1) // size * size - 1
        return last if first < last and end < sequence.goal else end

    def snapshot(self, sequence: Sequence) -> int | None:
        """A slot for a snapshot of what it has read after this plan; None: there should be none."""
        tokens = sequence.read + 1
        if self.snapshots is None or tokens % self.page_size or tokens > sequence.goal:
            return None
        slot = self.snapshots.take()
        if slot is not None:
            sequence.snapshots[tokens] = slot
        return slot

    def _last_full(self, sequence: Sequence) -> int:
        """Tokens of the full pages that it reads."""
        return sequence.goal // self.page_size * self.page_size

    def _forget(self, page: int) -> None:
        """A page gets another content."""
        node = self.cache.remove(page)
        if self.snapshots is not None:
            self.snapshots.remove(node)

    def _shareable(self, sequence: Sequence, reader: Sequence) -> int:
        """Tokens that a sequence could begin with once a reader has read all of its prompt."""
        common = self._common(sequence, reader)
        if self.snapshots is None:
            return common
        ends = (reader.branch, self._last_full(reader), *reader.snapshots)
        return max((end for end in ends if end <= common), default=0)

    def full_pages(self, sequence: Sequence, tokens: int) -> int:
        """Full pages of its first ``tokens`` tokens that may be shared."""
        read = tokens if self.limits.share_generated else min(tokens, sequence.goal)
        return read // self.page_size

    def _trim(self) -> None:
        """Take back the pages that running sequences hold for more than one round."""
        for sequence in self.running:
            kept = self._pages_needed(sequence, 1)
            if len(sequence.pages) > kept:
                self.pages.release(sequence.pages[kept:])
                del sequence.pages[kept:]
                sequence.table_changed = True

    def _pages_needed(self, sequence: Sequence, rounds: int) -> int:
        limits = self.limits
        slots = sequence.slots(rounds, limits.tokens_per_round, limits.scratch_slots)
        return pages_for(slots, self.page_size)

    def _sibling(self, sequence: Sequence) -> Sequence | None:
        """A running sample of the same prompt, which is read when this plan begins."""
        found = [x for x in self.running if x.has_read and self._is_sibling(sequence, x)]
        return min(found, key=lambda other: other.state is not State.DECODING, default=None)

    def _is_sibling(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether a sequence that has generated nothing is a sample of the other's prompt."""
        mine, its = sequence.request, other.request
        return (
            self.limits.share_pages
            and mine.group is not None
            and mine.group == its.group
            and sequence.is_new
            and sequence.namespace == other.namespace
            and mine.prompt == its.prompt
        )

    def _reading(self) -> list[Sequence]:
        """Running sequences that have not read all but drafts, as far as known. How much of a draft
        is kept nobody knows, so nobody waits for it."""
        return [
            other
            for other in self.running
            if other.num_complete_tokens < other.goal - bool(other.draft)
        ]

    def _common(self, sequence: Sequence, reader: Sequence) -> int:
        """Tokens of the full pages that both begin with, as far as the reader reads them."""
        if sequence.tokens[0] != reader.tokens[0] or sequence.namespace != reader.namespace:
            return 0  # the first token alone tells most from each other
        size, end = self.page_size, min(len(sequence.tokens), reader.goal)
        for start in range(0, end - size + 1, size):
            if sequence.tokens[start : start + size] != reader.tokens[start : start + size]:
                return start
        return end // size * size
