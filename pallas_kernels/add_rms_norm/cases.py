"""Shapes of add_rms_norm that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.benchmark import Arguments, Benchmark, implementation_to_time

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` rows of ``hidden``."""

    rows: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.hidden}"


TEST_CASES = (Case(1, 256), Case(5, 768), Case(6, 4096), Case(3, 16384))
BENCHMARK_CASES = tuple(Case(rows, 4096) for rows in (1, 6, 48, 192, 2048))


def make_arguments(
    case: Case, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Positional arguments of add_rms_norm, without eps."""
    x_key, y_key, weight_key = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    shape = (case.rows, case.hidden)
    return (
        jax.random.normal(x_key, shape, dtype),
        jax.random.normal(y_key, shape, dtype),
        1 + 0.1 * jax.random.normal(weight_key, shape[1:], dtype),
    )


def benchmarks() -> Sequence[Benchmark]:
    return [_benchmark(case) for case in BENCHMARK_CASES]


def _benchmark(case: Case) -> Benchmark:
    implementation = implementation_to_time()
    return Benchmark(
        name=str(case),
        make_arguments=lambda seed: make_arguments(case, jnp.bfloat16, seed),
        call=functools.partial(add_rms_norm, eps=EPS, implementation=implementation),
        reference=functools.partial(add_rms_norm_reference, eps=EPS),
        feed=_feed,
        num_bytes=2 * (4 * case.rows + 1) * case.hidden,
        flops=5 * case.rows * case.hidden,
        implementation=implementation,
    )


def _feed(arguments: Arguments, output: tuple[Array, Array]) -> Arguments:
    total, normed = output
    return (normed, total, *arguments[2:])
