"""Shapes of add_rms_norm that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.add_rms_norm import add_rms_norm, add_rms_norm_rounded
from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.benchmark import Arguments, Benchmark, implementation_to_time, noise
from pallas_kernels.selection import Implementation

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` rows of ``hidden`` entries. With ``num_splits`` above 1 the products are float32."""

    rows: int
    hidden: int
    num_splits: int = 1

    def __str__(self) -> str:
        partials = f", {self.num_splits} partial sums" if self.num_splits > 1 else ""
        return f"{self.rows} x {self.hidden}{partials}"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: rows, partial sums, weights, sums and normed sums."""
        partial_bytes = 2 if self.num_splits == 1 else 4 * self.num_splits
        return self.hidden * (2 + self.rows * (6 + partial_bytes))

    @property
    def num_rounded_bytes(self) -> int:
        """The same with normed sums of 8 bits, and their scales."""
        return self.num_bytes - self.rows * self.hidden + 4 * self.rows


TEST_CASES = (Case(1, 256), Case(5, 768), Case(6, 4096), Case(2, 4096, 8), Case(3, 16384, 2))
BENCHMARK_CASES = (
    *(Case(rows, 4096) for rows in (1, 6, 48, 192, 2048)),
    *(Case(rows, 4096, splits) for rows, splits in ((6, 4), (48, 4), (48, 8))),
)
ROUNDED_CASES = tuple(case for case in BENCHMARK_CASES if case.rows in (1, 6, 48))


def make_arguments(
    case: Case, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Positional arguments of add_rms_norm, without eps."""
    shape = (case.rows, case.hidden)
    partial_dtype = dtype if case.num_splits == 1 else jnp.float32
    padded = (case.num_splits, case.rows + (case.rows == 1), case.hidden)
    return (
        noise(seed, 0, shape, dtype),
        noise(seed, 1, padded, partial_dtype),
        1 + 0.1 * noise(seed, 2, shape[1:], dtype),
    )


def benchmarks() -> Sequence[Benchmark]:
    return [
        *(_benchmark(case) for case in BENCHMARK_CASES),
        *(rounded_benchmark(case) for case in ROUNDED_CASES),
    ]


def _benchmark(case: Case) -> Benchmark:
    implementation = implementation_to_time()
    return Benchmark(
        name=str(case),
        make_arguments=lambda seed: make_arguments(case, jnp.bfloat16, seed),
        call=functools.partial(add_rms_norm, eps=EPS, implementation=implementation),
        reference=functools.partial(add_rms_norm_reference, eps=EPS),
        feed=_feed,
        num_bytes=case.num_bytes,
        flops=5 * case.rows * case.hidden,
        implementation=implementation,
    )


def rounded_benchmark(case: Case) -> Benchmark:
    """add_rms_norm_rounded; the reference is XLA's norm and rounding."""
    plain = _benchmark(case)

    def call(*arguments: Array, implementation: Implementation) -> tuple[Array, Array, Array]:
        total, rounded, scale = add_rms_norm_rounded(
            *arguments, eps=EPS, implementation=implementation
        )
        return total, rounded, scale[:, : case.rows]  # without the padding

    return dataclasses.replace(
        plain,
        name=f"{case}, rounded to 8 bits",
        call=functools.partial(call, implementation=plain.implementation),
        reference=functools.partial(call, implementation="reference"),
        feed=_feed_sum,
        num_bytes=case.num_rounded_bytes,
    )


def _feed_sum(arguments: Arguments, output: tuple[Array, Array, Array]) -> Arguments:
    """The weights depend on what was rounded, behind a barrier, or XLA would leave the rounding
    out. That is a small launch more in every call."""
    total, rounded = lax.optimization_barrier(output[:2])
    _, partials, weight = arguments
    assert weight is not None
    return total, partials, weight + (1e-9 * rounded[0].astype(jnp.float32)).astype(weight.dtype)


def _feed(arguments: Arguments, output: tuple[Array, Array]) -> Arguments:
    _, normed = output
    return (normed, *arguments[1:])
