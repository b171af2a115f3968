"""Shapes of paged attention that tests and benchmarks share, and random arguments for them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. ``context_lens`` has an entry a sequence; with ``tree`` False queries are causal.

    ``num_columns`` None: as many pages a sequence as the longest needs.
    """

    name: str
    context_lens: tuple[int, ...]
    num_tokens: int
    num_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tree: bool = False
    window: int | None = None
    first_slot: int = 0
    num_columns: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def columns(self) -> int:
        """Pages a sequence: enough for the context and the queries' own slots."""
        needed = -(-(max(self.context_lens) + self.num_tokens) // self.page_size)
        return max(needed, self.num_columns or 0)

    @property
    def options(self) -> dict[str, Any]:
        return {"window": self.window, "first_slot": self.first_slot}


TEST_CASES = (
    Case("one query", (37, 12), 1, 4, 2, 16, 16),
    Case("empty and one-token contexts", (0, 1, 33), 3, 4, 2, 16, 16),
    Case("page boundaries", (15, 16, 17, 32), 1, 4, 2, 16, 16),
    Case("boundaries inside the queries", (13, 14, 15, 16), 5, 4, 1, 16, 16),
    Case("page size 1", (9, 0, 21), 4, 4, 4, 8, 1),
    Case("odd page size", (9, 20), 6, 6, 2, 8, 5),
    Case("page of 64", (63, 64, 130), 8, 8, 2, 16, 64),
    Case("wide table", (5, 40), 2, 4, 2, 16, 4, num_columns=30),
    Case("causal chunk", (40, 3), 64, 4, 2, 16, 16),
    Case("small tree", (30, 0, 7), 6, 4, 2, 16, 16, tree=True),
    Case("tree of two mask words", (30, 65), 33, 4, 2, 16, 16, tree=True),
    Case("tree of 64", (50, 1), 64, 8, 2, 16, 16, tree=True),
    Case("window", (40, 5, 90), 4, 4, 2, 16, 16, window=12),
    Case("window under a tree", (40, 5, 90), 20, 4, 2, 16, 16, tree=True, window=12),
    Case("first slot", (20, 2, 1), 3, 4, 2, 16, 16, first_slot=1),
    Case("first slot under a tree", (20, 2, 1), 12, 4, 2, 16, 16, tree=True, first_slot=1),
)

# What the Hopper kernel takes: wide heads, pages that fill tiles.
KERNEL_CASES = (
    Case("K: one query", (70, 130), 1, 8, 2, 128, 64),
    Case("K: contexts around a page", (0, 1, 63, 64, 65), 1, 8, 2, 128, 64),
    Case("K: seven heads a group", (0, 63, 100), 3, 7, 1, 64, 64),
    Case("K: pages of 16, a tree", (70, 130), 6, 8, 2, 128, 16, tree=True),
    Case("K: pages of 128", (70, 300), 16, 8, 2, 128, 128, tree=True),
    Case("K: two tiles", (10, 200), 20, 8, 2, 128, 64, tree=True),
    Case("K: tree of 64", (50, 1), 64, 8, 2, 64, 64, tree=True),
    Case("K: window", (10, 200), 40, 8, 2, 64, 128, window=30),
    Case("K: window under a tree", (70, 130), 6, 8, 2, 128, 16, tree=True, window=40),
    Case("K: first slot", (70, 3), 6, 8, 2, 128, 16, tree=True, first_slot=1),
    Case("K: causal chunk", (10, 200), 80, 8, 2, 64, 64),
)

# Llama-3.1-8B: 32 query heads over 8 KV heads of 128.
_LLAMA: dict[str, Any] = {"num_heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64}
BENCHMARK_CASES = (
    Case("decode 1 x 8k", (8192,), 1, **_LLAMA),
    Case("decode 8 x 8k", (8192,) * 8, 1, **_LLAMA),
    Case("chain 8 x 1k", (1024,) * 8, 8, tree=True, **_LLAMA),
    Case("chain 32 x 4k", (4096,) * 32, 8, tree=True, **_LLAMA),
    Case("tree of 64, 1 x 8k", (8192,), 64, tree=True, **_LLAMA),
    Case("tree of 64, 8 x 8k", (8192,) * 8, 64, tree=True, **_LLAMA),
)


def random_parents(rng: np.random.Generator, size: int, max_depth: int) -> np.ndarray:
    """Parents [N] of a random tree whose node 0 is the root; -1 for the root."""
    parents, depth = np.full(size, -1), np.zeros(size, int)
    for node in range(1, size):
        parents[node] = rng.choice(np.flatnonzero(depth[:node] < max_depth))
        depth[node] = depth[parents[node]] + 1
    return parents


def ancestor_words(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed ancestors [N, words], self included, and depth [N] of a tree's nodes."""
    size = len(parents)
    mask, depth = np.eye(size, -(-size // 32) * 32, dtype=bool), np.zeros(size, int)
    for node in range(1, size):
        mask[node] |= mask[parents[node]]
        depth[node] = depth[parents[node]] + 1
    return np.packbits(mask, axis=1, bitorder="little").view("<u4"), depth


def make_arguments(
    case: Case, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Array, Array, Array, Array, Array, Array, Array | None]:
    """Positional arguments of paged_attention; each sequence's pages lie scattered in the pool.

    Every slot holds noise, those that no query may see too.
    """
    rng = np.random.default_rng(seed)
    batch, columns = len(case.context_lens), case.columns
    num_pages = 1 + batch * columns
    pool = (num_pages, case.kv_heads, case.page_size, case.head_dim)
    depth = np.tile(np.arange(case.num_tokens), (batch, 1))
    ancestors = None
    if case.tree:
        max_depth = min(8, (case.window or 9) - 1)
        trees = [
            ancestor_words(random_parents(rng, case.num_tokens, max_depth)) for _ in range(batch)
        ]
        words, depths = zip(*trees, strict=True)
        ancestors, depth = jnp.asarray(np.stack(words)), np.stack(depths)
    context_lens = np.array(case.context_lens, np.int32)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    return (
        normal(batch, case.num_tokens, case.num_heads, case.head_dim),
        normal(*pool),
        normal(*pool),
        jnp.asarray(1 + rng.permutation(batch * columns).reshape(batch, columns), jnp.int32),
        jnp.asarray(context_lens),
        jnp.asarray(context_lens[:, None] + depth, jnp.int32),
        ancestors,
    )
