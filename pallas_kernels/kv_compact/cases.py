"""Shapes of kv_compact that tests and benchmarks share, and random arguments for them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference, noise
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.selection import Implementation


@dataclasses.dataclass(frozen=True)
class Case:
    """One path of ``depth`` nodes in each of ``batch`` trees of ``num_nodes``, over many caches."""

    batch: int
    num_nodes: int
    depth: int
    num_caches: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 64

    def __str__(self) -> str:
        return f"{self.batch} x {self.depth} of {self.num_nodes}, {self.num_caches} caches"

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows read and written."""
        return 4 * self.batch * self.depth * self.num_caches * self.kv_heads * self.head_dim


TEST_CASES = (
    Case(2, 12, 5, num_caches=3, kv_heads=2, page_size=8),
    Case(1, 60, 8, num_caches=18, kv_heads=1, page_size=16),
)
# Llama-3.1-8B: keys and values of 32 layers.
BENCHMARK_CASES = tuple(Case(batch, 60, 8, num_caches=64, kv_heads=8) for batch in (1, 8))


def make_arguments(case: Case, dtype: Any = jnp.float32, seed: int = 0) -> tuple[Any, Array, Array]:
    """Positional arguments of kv_compact: random paths, the first one a node shorter."""
    rng = np.random.default_rng(seed)
    columns = 1 + case.num_nodes // case.page_size
    first = (1 + np.arange(case.batch) * columns) * case.page_size + 1  # slot of each root
    paths = np.stack(
        [np.sort(rng.permutation(case.num_nodes)[: case.depth]) for _ in range(case.batch)]
    )
    source, destination = first[:, None] + paths, first[:, None] + np.arange(case.depth)
    for slots in (source, destination):
        slots[0, -1:] = 0  # in the null page
    pool = (1 + case.batch * columns, case.kv_heads, case.page_size, case.head_dim)
    pages = tuple(noise(seed, index, pool, dtype) for index in range(case.num_caches))
    return pages, jnp.asarray(source.astype("i4")), jnp.asarray(destination.astype("i4"))


def benchmarks() -> Sequence[Benchmark]:
    return [_benchmark(case) for case in BENCHMARK_CASES]


def _benchmark(case: Case) -> Benchmark:
    def flat(seed: int) -> Arguments:
        pages, source, destination = make_arguments(case, jnp.bfloat16, seed)
        return source, destination, *pages

    def call(*arguments: Array, implementation: Implementation) -> tuple[Array, ...]:
        source, destination, *pages = arguments
        return kv_compact(tuple(pages), source, destination, implementation)

    def feed(arguments: Arguments, output: tuple[Array, ...]) -> Arguments:
        return *arguments[:2], *output

    return beside_reference(case, flat, call, feed, flops=0, rotates=False)
