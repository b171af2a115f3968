"""Which pages hold the KV of which prompts, of one data shard."""

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A full page of a known sequence of tokens."""

    id: int
    page: int


class PrefixCache:
    """An index of full pages, chained: a page is found through the page before it.

    The key of a page is exact: the node before it, or the namespace for a first page, and the
    page's own tokens. So two sequences share a page only if all tokens up to its end are equal, and
    no hash can collide. A namespace is whatever else the KV depends on, and the cache salt.

    The index owns no page. PageAllocator evicts the least recently used one and tells ``remove``.
    Every sequence that holds a page also holds those before it, and releases them later; so the
    end of a chain is evicted before its beginning.

    Attributes:
      queries: tokens that were looked up, as told to ``count``.
      hits: those of them whose KV was found.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.queries = 0
        self.hits = 0
        self._ids = itertools.count()
        self._nodes: dict[tuple[Hashable, tuple[int, ...]], Node] = {}
        self._keys: dict[int, tuple[Hashable, tuple[int, ...]]] = {}  # by page

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int], namespace: tuple[Hashable, ...]) -> list[Node]:
        """The longest known chain of full pages that ``tokens`` begins with."""
        chain: list[Node] = []
        parent: Hashable = namespace
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            node = self._nodes.get((parent, tuple(tokens[start : start + self.page_size])))
            if node is None:
                break
            chain.append(node)
            parent = node.id
        return chain

    def insert(
        self,
        chain: Sequence[Node],
        namespace: tuple[Hashable, ...],
        tokens: Sequence[int],
        page: int,
    ) -> Node:
        """Make a page known that follows ``chain`` and holds the KV of ``tokens`` [page_size].

        Returns its node: the present one, with another page, if these tokens are already known.
        """
        key = (chain[-1].id if chain else namespace, tuple(tokens))
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(next(self._ids), page)
            self._keys[page] = key
        return node

    def remove(self, page: int) -> Node:
        """Forget a page that gets another content. Returns its node."""
        return self._nodes.pop(self._keys.pop(page))

    def count(self, queries: int, hits: int) -> None:
        """Add a request's tokens, and those of them that it found, to the statistics."""
        self.queries += queries
        self.hits += hits
