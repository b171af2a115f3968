"""What a page allocator keeps of each page, for the tests that look inside."""

from jaxspec.scheduling.pages import PageAllocator


def holders(allocator: PageAllocator, page: int) -> int:
    """Number of sequences that hold the page."""
    return allocator._holders[page]


def is_writable(allocator: PageAllocator, page: int) -> bool:
    """Whether the page has one holder, and the prefix cache does not know it."""
    return allocator._holders[page] == 1 and not allocator._kept[page]


def free_pages(allocator: PageAllocator) -> list[int]:
    """Pages without content."""
    return list(allocator._free)
