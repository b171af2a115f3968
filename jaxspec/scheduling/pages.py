"""Pages of one data shard: who holds them, and which of them may be given out."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from jaxspec.config.cache import pages_for


class OutOfPages(Exception):
    """More pages were asked for than are available."""


def _nobody_cares(page: int) -> None:
    pass


class PageAllocator:
    """Reference counts of pages 1 .. num_pages. Page 0, the null page, is never given out.

    A page is *held* by one or more sequences, *idle* (nobody holds it, but the prefix cache knows
    its content), or *free*. When no free page is left, idle ones are given out, the one that was
    released first before the others.

    A page may be written only while ``writable``: one holder, and unknown to the prefix cache.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] = _nobody_cares):
        """``on_evict`` is called with each idle page that is about to get another content."""
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._free = list(range(num_pages, 0, -1))
        self._holders = [0] * (num_pages + 1)
        self._kept = bytearray(num_pages + 1)  # 1: the prefix cache knows the content
        self._idle: OrderedDict[int, None] = OrderedDict()  # released first, evicted first

    @property
    def available(self) -> int:
        """Pages that can be allocated."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix cache uses."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.available

    def holders(self, page: int) -> int:
        """Number of sequences that hold the page."""
        return self._holders[page]

    def writable(self, page: int) -> bool:
        return self._holders[page] == 1 and not self._kept[page]

    def allocate(self, count: int) -> list[int]:
        """New pages with one holder. Raises OutOfPages, and then nothing has changed."""
        if count > self.available:
            raise OutOfPages(f"{count} pages are needed, {self.available} are available")
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are held or idle. Raises ValueError for a free one."""
        for page in pages:
            if self._holders[page] == 0:
                if page not in self._idle:
                    raise ValueError(f"page {page} is free: it cannot be shared")
                del self._idle[page]
            self._holders[page] += 1

    def fork(self, pages: Sequence[int], filled: int, page_size: int) -> tuple[list[int], int]:
        """A second holder's view of the first ``filled`` slots of a sequence's pages.

        Full pages are shared. A partly filled last one must be copied, since its holder goes on to
        write there. Returns the shared pages, and the page to copy (0: none).
        """
        shared = list(pages[: filled // page_size])
        self.share(shared)
        return shared, pages[len(shared)] if filled % page_size else 0

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder of each page of a sequence.

        The last page goes first, so that of a cached chain the end is evicted before the beginning.
        Raises ValueError for a page that nobody holds.
        """
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is released, but nobody holds it")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """The prefix cache knows this held page: never write it again, and evict it late."""
        if self._holders[page] == 0:
            raise ValueError(f"page {page} is kept, but nobody holds it")
        self._kept[page] = 1

    def num_idle_of(self, pages: Iterable[int]) -> int:
        """How many of these pages are idle: sharing them makes as many fewer available."""
        return sum(page in self._idle for page in pages)

    def free_pages(self) -> list[int]:
        """Pages without content."""
        return list(self._free)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._idle.popitem(last=False)
        self._kept[page] = 0
        self._on_evict(page)
        return page


@dataclasses.dataclass(frozen=True)
class PageUsage:
    """What the pages of all shards are used for.

    Attributes:
      total: pages, null pages not counted.
      free, idle: without content; known to the prefix cache only.
      context: pages that hold tokens of running sequences; a shared one counts once.
      lookahead: pages that sequences hold past their tokens, for trees and for the rounds to come.
      tokens: tokens in the context pages; those of a shared page count once.
      waste: share of the slots in context pages that hold no token.
    """

    total: int
    free: int
    idle: int
    context: int
    lookahead: int
    tokens: int
    waste: float

    @property
    def used(self) -> float:
        """Share of all pages that sequences hold."""
        return (self.context + self.lookahead) / self.total


def page_usage(
    shards: Iterable[tuple[PageAllocator, Iterable[tuple[Sequence[int], int]]]], page_size: int
) -> PageUsage:
    """The usage of shards, each an allocator and the (pages, tokens) of its running sequences."""
    total = free = idle = held = context = tokens = 0
    for allocator, sequences in shards:
        total += allocator.num_pages
        idle += allocator.num_idle
        free += allocator.available - allocator.num_idle
        held += allocator.num_held
        filled: dict[int, int] = {}  # page -> its tokens
        for pages, length in sequences:
            for index, page in enumerate(pages[: pages_for(length, page_size)]):
                here = min(page_size, length - index * page_size)
                filled[page] = max(here, filled.get(page, 0))
        context += len(filled)
        tokens += sum(filled.values())
    return PageUsage(
        total=total,
        free=free,
        idle=idle,
        context=context,
        lookahead=held - context,
        tokens=tokens,
        waste=1 - tokens / (context * page_size) if context else 0.0,
    )
