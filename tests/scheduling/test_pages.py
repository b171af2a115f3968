"""The page allocator: holders, sharing, eviction, and what the pages are used for."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.scheduling.pages import OutOfPages, PageAllocator, page_usage
from tests.scheduling.fake_device import free_pages, holders, is_writable


def test_double_free_and_sharing_of_a_free_page_are_refused():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is released, but nobody holds it"):
        allocator.release(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is free"):
        allocator.share(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is kept, but nobody holds it"):
        allocator.keep(pages[0])


def test_kept_pages_stay_until_they_are_needed_and_the_end_of_a_chain_goes_first():
    evicted: list[int] = []
    allocator = PageAllocator(4, on_evict=evicted.append)
    chain, other = allocator.allocate(2), allocator.allocate(1)
    for page in [*chain, *other]:
        allocator.keep(page)
        assert not is_writable(allocator, page)
    allocator.release(chain)
    allocator.release(other)
    assert (allocator.num_idle, allocator.available) == (3, 4)
    allocator.allocate(1)
    assert evicted == []
    assert allocator.allocate(2) == [chain[1], chain[0]] == evicted
    assert all(is_writable(allocator, page) for page in chain)


def test_an_idle_page_that_is_shared_again_is_evicted_late():
    evicted: list[int] = []
    allocator = PageAllocator(2, on_evict=evicted.append)
    first, second = allocator.allocate(1), allocator.allocate(1)
    for pages in (first, second):
        allocator.keep(pages[0])
        allocator.release(pages)
    allocator.share(first)
    allocator.release(first)
    allocator.allocate(1)
    assert evicted == second


def test_a_shared_page_counts_once():
    allocator = PageAllocator(8)
    pages = allocator.allocate(2)
    shared, _ = allocator.fork(pages, 16, 16)
    usage = page_usage([(allocator, [(pages, 30), (shared + allocator.allocate(1), 20)])], 16)
    assert (usage.context, usage.tokens, usage.waste) == (3, 34, 1 - 34 / 48)


def test_no_sequences_waste_nothing():
    assert page_usage([(PageAllocator(4), [])], 16).waste == 0


def check(allocator: PageAllocator, tables: list[list[int]], kept: set[int]) -> None:
    """Every page is held as often as it stands in a table, and is nowhere twice."""
    held = [page for table in tables for page in table]
    assert all(
        holders(allocator, page) == held.count(page) for page in range(1, allocator.num_pages + 1)
    )
    free, idle = set(free_pages(allocator)), kept - set(held)
    assert len(free) == len(free_pages(allocator))
    assert free.isdisjoint(held) and free.isdisjoint(kept)
    assert allocator.num_idle == len(idle)
    assert len(set(held)) + len(free) + len(idle) == allocator.num_pages
    for page in set(held):
        assert is_writable(allocator, page) == (held.count(page) == 1 and page not in kept)


class Allocations(RuleBasedStateMachine):
    """Any use of the allocator keeps its books right."""

    def __init__(self):
        super().__init__()
        self.kept: set[int] = set()
        self.allocator = PageAllocator(12, on_evict=self.kept.remove)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int):
        if count > self.allocator.available:
            with pytest.raises(OutOfPages):
                self.allocator.allocate(count)
        else:
            self.tables.append(self.allocator.allocate(count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject):
        table = data.draw(st.sampled_from(self.tables))
        filled = data.draw(st.integers(0, 4 * len(table)))
        shared, copied = self.allocator.fork(table, filled, 4)
        assert shared == table[: filled // 4]
        assert copied == (table[filled // 4] if filled % 4 else 0)
        self.tables.append(shared)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def keep(self, data: st.DataObject):
        table = data.draw(st.sampled_from(self.tables))
        for page in table[: data.draw(st.integers(0, len(table)))]:
            self.allocator.keep(page)
            self.kept.add(page)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.allocator.release(table)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject):
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.allocator.share([page])
        self.tables.append([page])

    @invariant()
    def books_are_right(self):
        check(self.allocator, self.tables, self.kept)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
