"""The prefix cache: a page is found by all tokens up to its end, and by nothing less."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.scheduling.pages import PageAllocator
from jaxspec.scheduling.prefix_cache import Node, PrefixCache

K = 4
PLAIN = (None, None)


def known(cache: PrefixCache, tokens: Sequence[int], pages: Sequence[int], namespace=PLAIN):
    """Insert the full pages of ``tokens``; returns their nodes."""
    chain: list[Node] = []
    for index, page in enumerate(pages):
        chain.append(cache.insert(chain, namespace, tokens[index * K : (index + 1) * K], page))
    return chain


def pages(nodes: Sequence[Node]) -> list[int]:
    return [node.page for node in nodes]


def test_the_longest_known_prefix_is_found_in_full_pages():
    cache = PrefixCache(K)
    known(cache, range(12), [5, 6, 7])
    assert pages(cache.match(range(12), PLAIN)) == [5, 6, 7]
    assert pages(cache.match(range(11), PLAIN)) == [5, 6]
    assert pages(cache.match([*range(8), 0, 0, 0, 0], PLAIN)) == [5, 6]
    assert cache.match(range(3), PLAIN) == []
    assert cache.match([], PLAIN) == []


def test_equal_tokens_after_another_beginning_are_another_page():
    cache = PrefixCache(K)
    known(cache, [0] * 4 + [9] * 4, [1, 2])
    assert cache.match([9] * 4, PLAIN) == []
    assert pages(cache.match([0] * 4 + [8] * 4, PLAIN)) == [1]


def test_namespaces_share_nothing():
    cache = PrefixCache(K)
    known(cache, range(4), [1], namespace=("adapter", None))
    known(cache, range(4), [2], namespace=(None, "salt"))
    assert cache.match(range(4), PLAIN) == []
    assert pages(cache.match(range(4), ("adapter", None))) == [1]
    assert pages(cache.match(range(4), (None, "salt"))) == [2]


def test_tokens_that_are_known_keep_their_page():
    cache = PrefixCache(K)
    known(cache, range(4), [1])
    assert pages(known(cache, range(4), [2])) == [1]
    assert len(cache) == 1


def test_a_removed_page_is_not_found_and_its_number_can_return():
    cache = PrefixCache(K)
    known(cache, range(8), [1, 2])
    cache.remove(2)
    assert pages(cache.match(range(8), PLAIN)) == [1]
    cache.remove(1)
    known(cache, [7] * 4, [1])  # page 1 has another content: nothing of the old chain follows it
    assert pages(cache.match([7] * 4 + [4, 5, 6, 7], PLAIN)) == [1]
    assert cache.match(range(8), PLAIN) == []


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=14), st.booleans()), max_size=30),
    st.integers(3, 8),
)
def test_a_found_page_holds_exactly_these_tokens_and_chains_lose_their_ends_first(requests, room):
    cache = PrefixCache(2)
    content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end

    def evict(page: int):
        gone = content.pop(page)
        assert not any(c[: len(gone)] == gone for c in content.values())  # it was a leaf
        cache.remove(page)

    allocator = PageAllocator(room, on_evict=evict)
    for tokens, is_short in requests:
        tokens = tokens[: 2 * room]
        found = cache.match(tokens, PLAIN)
        for index, node in enumerate(found):
            assert content[node.page] == tuple(tokens[: 2 * index + 2])
        held = pages(found)[: 1 if is_short else None]
        allocator.share(held)
        chain = found[: len(held)]
        for end in range(2 * len(held) + 2, len(tokens) + 1, 2):
            (page,) = allocator.allocate(1)
            node = cache.insert(chain, PLAIN, tokens[end - 2 : end], page)
            if node.page == page:
                allocator.keep(page)
                content[page] = tuple(tokens[:end])
            else:
                allocator.share([node.page])
                allocator.release([page])
            chain.append(node)
            held.append(node.page)
        allocator.release(held)
    assert allocator.available == room
    assert len(cache) == len(content)
