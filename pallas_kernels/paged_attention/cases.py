"""Shapes of paged attention that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.benchmark import (
    Arguments,
    Benchmark,
    beside_reference,
    float8_noise,
    noise,
)
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.partial import partial_attention
from pallas_kernels.paged_attention.parts import PartialAttention
from pallas_kernels.pages import AttentionOptions, LayerPages, QueryContext
from pallas_kernels.selection import Implementation


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      context_lens: one entry per sequence.
      tree: whether queries are tree nodes; otherwise they are causal.
      num_columns: columns of the page table; None: as many pages as the longest sequence needs.
      real_tokens: tokens of each sequence that are not padding; None: all.
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
    softcap: float | None = None
    num_columns: int | None = None
    real_tokens: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def columns(self) -> int:
        """Pages per sequence: enough for the context and the queries' own slots."""
        needed = -(-(max(self.context_lens) + self.num_tokens) // self.page_size)
        return max(needed, self.num_columns or 0)

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.window, softcap=self.softcap, first_slot=self.first_slot)

    @property
    def visible_slots(self) -> int:
        """Visible slots of all sequences, the queries' own included."""
        most = max(self.context_lens) if self.window is None else self.window
        context = sum(min(max(length - self.first_slot, 0), most) for length in self.context_lens)
        return context + len(self.context_lens) * self.num_tokens

    @property
    def num_bytes(self) -> int:
        """In bfloat16: keys and values of the visible slots, queries and output."""
        return 2 * (2 * self.visible_slots * self.kv_heads * self.head_dim + 2 * self.num_entries)

    @property
    def num_entries(self) -> int:
        """The entries of the queries."""
        return len(self.context_lens) * self.num_tokens * self.num_heads * self.head_dim

    @property
    def num_float8_bytes(self) -> int:
        """``num_bytes`` with keys and values of a byte each."""
        return self.num_bytes - 2 * self.visible_slots * self.kv_heads * self.head_dim

    def num_partial_bytes(self, devices: int) -> int:
        """``num_bytes`` of one of several devices; the output is in float32, with a log-sum-exp
        of each query."""
        cache = 4 * self.visible_slots * self.kv_heads * self.head_dim // devices
        return cache + (2 + 4) * self.num_entries + 4 * self.num_entries // self.head_dim

    @property
    def flops(self) -> int:
        """FLOPs of scores and weighted sums, as if each query saw all slots of its sequence."""
        return 4 * self.num_tokens * self.num_heads * self.head_dim * self.visible_slots


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
    Case("padded chunk", (20, 0, 31), 9, 4, 2, 16, 16, real_tokens=5),
    Case("padded tree", (20, 0, 31), 40, 4, 2, 16, 16, tree=True, real_tokens=33),
    Case("all see the context alone", (20, 8, 31), 8, 4, 2, 16, 16, real_tokens=0),
)

# Shapes that the Hopper kernel takes.
KERNEL_CASES = (
    Case("K: one query", (70, 130), 1, 8, 2, 128, 64),
    Case("K: one node of a tree", (70, 0, 130), 1, 8, 2, 128, 16, tree=True),
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
    Case("K: padded chunk", (10, 125), 30, 4, 1, 128, 16, real_tokens=3),
    Case("K: all see the context alone", (8, 125, 128), 8, 8, 2, 128, 64, real_tokens=0),
)

# Long enough to reuse each stage of the kernel's ring many times. Some splits have no work.
LONG_CASES = (
    Case("L: one query", (3000, 5, 1025), 1, 8, 2, 128, 64),
    Case("L: a chain", (3000, 5, 1025), 6, 8, 2, 128, 16, tree=True),
    Case("L: many pairs", (3000, 5, 1025) * 7, 6, 32, 8, 128, 64, tree=True),
    Case("L: long runs", (9000, 5), 6, 8, 2, 128, 64, tree=True),
    Case("L: tree of 60", (3000, 5, 1025), 60, 8, 2, 128, 64, tree=True),
    Case("L: window", (3000, 5, 1025), 60, 8, 2, 128, 64, tree=True, window=500),
    Case("L: causal chunk", (2000, 0, 77), 512, 8, 2, 128, 64),
)

# Llama-3.1-8B: 32 query heads and 8 KV heads of 128. Several queries form a tree, but for chunks.
_llama_case = functools.partial(Case, num_heads=32, kv_heads=8, head_dim=128)

# Pages of 16 slots are timed for larger batches only.
BENCHMARK_CASES = tuple(
    _llama_case(
        f"{batch} x {context}k, {num_tokens} queries, page {page_size}",
        (1024 * context,) * batch,
        num_tokens,
        page_size=page_size,
        tree=num_tokens > 1,
    )
    for page_size in (64, 16)
    for num_tokens, shapes in (
        (1, ((1, 1), (1, 8), (8, 1), (8, 8), (8, 32), (32, 4))),
        (8, ((1, 1), (1, 8), (8, 1), (8, 8), (8, 32), (32, 4))),
        (64, ((1, 8), (8, 8))),
    )
    for batch, context in shapes
    if page_size == 64 or batch > 1
)

# One device's part of sequences that are spread over two.
PARTIAL_BENCHMARK_CASES = tuple(
    _llama_case(
        f"half of {batch} x {context}k, {num_tokens} queries, page {page_size}",
        (1024 * context,) * batch,
        num_tokens,
        page_size=page_size,
        tree=num_tokens < 512,
    )
    for batch, context, num_tokens, page_size in (
        (1, 32, 1, 128),
        (1, 32, 8, 128),
        (1, 32, 64, 128),
        (1, 32, 1024, 128),
        (8, 8, 8, 128),
        (8, 8, 8, 16),
    )
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
) -> tuple[Array, LayerPages, QueryContext]:
    """Positional arguments of paged_attention. Each sequence's pages are scattered over the pool.

    Every slot holds noise, including those that no query may see.
    """
    rng = np.random.default_rng(seed)
    batch, columns = len(case.context_lens), case.columns
    num_pages = 1 + batch * columns
    queries = (batch, case.num_tokens, case.num_heads, case.head_dim)
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
    real_tokens = case.num_tokens if case.real_tokens is None else case.real_tokens
    q, k, v = (noise(seed, i, shape, dtype) for i, shape in enumerate((queries, pool, pool)))
    table = (1 + rng.permutation(batch * columns)).reshape(batch, columns).astype("i4")
    context = QueryContext(
        page_table=jnp.asarray(table),
        context_lens=jnp.asarray(context_lens),
        positions=jnp.asarray((context_lens[:, None] + depth).astype("i4")),
        ancestors=ancestors,
        kv_lens=jnp.asarray((context_lens + real_tokens).astype("i4")),
    )
    return q, LayerPages(k, v), context


def with_float8_pages(arguments: Any, seed: int = 0) -> Any:
    """Arguments of paged_attention with pages of bytes instead, and their scales."""
    q, pages, context = arguments
    (k, k_scale), (v, v_scale) = (float8_noise(seed, index, pages.k.shape) for index in (3, 4))
    return q, LayerPages(k, v, k_scale, v_scale), context


def parts_of(arguments: Any, count: int) -> list[Any]:
    """Arguments of partial_attention on each of ``count`` devices that share the sequences."""
    q, pages, context = arguments
    size = pages.k.shape[2] // count

    def part(offset: int) -> LayerPages:
        k, v = (x[:, :, offset : offset + size] for x in (pages.k, pages.v))
        return pages._replace(k=k, v=v)

    offsets = range(0, count * size, size)
    return [(q, part(offset), context, jnp.int32(offset)) for offset in offsets]


def normalized(part: PartialAttention) -> tuple[Array, Array]:
    """The part's own attention [B, T, Q, D] and log-sum-exps [B, T, Q].

    Unlike maxima and sums they do not depend on how the part was computed.
    """
    return part.weighted / part.total[..., None], part.peak + jnp.log(part.total)


def poisoned(case: Case, arguments: Any, poison: float) -> Any:
    """The same arguments, with ``poison`` in all keys and values that no query sees.

    Those are the null page (to which unused columns of the page table point), a page of no
    sequence, and slots past ``kv_lens``, before ``first_slot`` or left of every query's window.
    """
    q, pages, context = arguments
    table, context_lens, positions, _, kv_lens = context
    table = np.asarray(table)
    slots = np.arange(case.columns * case.page_size).reshape(case.columns, case.page_size)
    first = np.full(len(case.context_lens), case.first_slot)
    if case.window is not None:
        in_window = np.min(positions, axis=1) - case.window + 1
        first = np.maximum(first, np.minimum(in_window, context_lens))
    first, end = first[:, None, None], np.asarray(kv_lens)[:, None, None]
    table = np.where(slots[:, 0] < end[:, 0], table, 0)
    hidden = np.ones((len(pages.k) + 1, case.page_size), bool)
    hidden[table] = (slots < first) | (slots >= end)
    hidden[0] = True

    def spoiled(x: Array) -> Array:
        kept = np.asarray(x)
        more = np.concatenate([kept, np.zeros_like(kept[:1])])
        return jnp.asarray(np.where(hidden[:, None, :, None], kept.dtype.type(poison), more))

    pages = pages._replace(k=spoiled(pages.k), v=spoiled(pages.v))
    return q, pages, context._replace(page_table=jnp.asarray(table))


def benchmarks(cases: Sequence[Case] = BENCHMARK_CASES) -> list[Benchmark]:
    """The cases as calls to be timed; the output of a call is the next call's queries."""
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case, jnp.bfloat16),
            functools.partial(paged_attention, options=case.options),
            lambda arguments, output: (output, *arguments[1:]),
            flops=case.flops,
        )
        for case in cases
    ]


def float8_benchmarks(cases: Sequence[Case] = BENCHMARK_CASES) -> list[Benchmark]:
    """``benchmarks`` with 8-bit pages."""

    def narrowed(case: Case, wide: Benchmark) -> Benchmark:
        return dataclasses.replace(
            wide,
            make_arguments=lambda seed: with_float8_pages(wide.make_arguments(seed), seed),
            num_bytes=case.num_float8_bytes,
        )

    return [*map(narrowed, cases, benchmarks(cases))]


def partial_benchmarks(cases: Sequence[Case] = PARTIAL_BENCHMARK_CASES) -> list[Benchmark]:
    """``benchmarks`` of the first of two devices that share the sequences."""
    return [_partial_benchmark(case) for case in cases]


def _partial_benchmark(case: Case) -> Benchmark:
    def part(seed: int) -> Arguments:
        return parts_of(make_arguments(case, jnp.bfloat16, seed), 2)[0]

    def call(*arguments: Any, implementation: Implementation) -> tuple[Array, Array]:
        found = partial_attention(
            *arguments,
            options=case.options,
            page_size=case.page_size,
            implementation=implementation,
        )
        return normalized(found)

    def feed(arguments: Arguments, output: tuple[Array, Array]) -> Arguments:
        return output[0].astype(jnp.bfloat16), *arguments[1:]

    benchmark = beside_reference(case, part, call, feed, flops=case.flops // 2)
    return dataclasses.replace(benchmark, num_bytes=case.num_partial_bytes(2))
