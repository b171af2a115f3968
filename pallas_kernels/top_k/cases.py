"""Shapes of top_k that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence

from jax import Array

from pallas_kernels.benchmark import Benchmark, beside_reference, noise
from pallas_kernels.selection import Implementation
from pallas_kernels.top_k import top_k


@dataclasses.dataclass(frozen=True)
class Case:
    """The ``k`` largest entries of each of ``rows`` rows of ``size`` entries."""

    rows: int
    size: int
    k: int

    def __str__(self) -> str:
        return f"{self.k} of {self.rows} x {self.size}"

    @property
    def num_bytes(self) -> int:
        return 4 * self.rows * (self.size + 2 * self.k + 1)


TEST_CASES = (Case(3, 1024, 10), Case(2, 4096, 1), Case(10, 32_000, 10), Case(1, 65_536, 16))
# One level of an EAGLE-3 tree over a draft vocabulary of 32,000, for 1, 8 and 32 sequences.
BENCHMARK_CASES = tuple(Case(rows, 32_000, 10) for rows in (10, 80, 320))


def make_arguments(case: Case, seed: int = 0) -> tuple[Array]:
    """Positional arguments of top_k, without k."""
    return (noise(seed, 0, (case.rows, case.size)),)


def benchmarks() -> Sequence[Benchmark]:
    return [_benchmark(case) for case in BENCHMARK_CASES]


def _benchmark(case: Case) -> Benchmark:
    def call(x: Array, implementation: Implementation) -> tuple[Array, ...]:
        """The results, and the rows for the next call: the same array, updated in place.

        It stays in the GPU's cache, as it does in the engine after the LM head's product.
        """
        values, indices, log_sum = top_k(x, case.k, implementation)
        first = (log_sum, values[..., -1], indices[..., -1].astype(x.dtype))
        fed = x.at[0, 0].set(sum(array.reshape(-1)[0] for array in first))
        return values, indices, log_sum, fed

    return beside_reference(
        case,
        functools.partial(make_arguments, case),
        call,
        lambda arguments, output: (output[-1],),
        flops=2 * case.rows * case.size,
        rotates=False,
    )
