"""Shapes of gated_norm that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Benchmark, beside_reference, noise
from pallas_kernels.gated_norm import HEAD_DIM, gated_norm, gated_norm_rounded

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` rows of ``groups`` x ``heads`` heads; ``others`` entries are before the gates."""

    rows: int
    groups: int
    heads: int
    others: int = 512
    rounded: bool = False

    def __str__(self) -> str:
        rounded = ", rounded" if self.rounded else ""
        return f"{self.rows} x {self.groups} x {self.heads} heads{rounded}"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: outputs in float32, gates and results."""
        return self.rows * self.groups * self.heads * HEAD_DIM * (7 if self.rounded else 8)


TEST_CASES = (Case(3, 4, 2), Case(1, 2, 1, others=0), Case(2, 1, 4, others=100))
BENCHMARK_CASES = tuple(
    Case(rows, 16, 2, rounded=rounded) for rows in (2, 8, 32, 512) for rounded in (False, True)
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Array, Array, Array]:
    """Positional arguments of gated_norm, without eps."""
    shape = case.rows, case.groups
    width = case.others + case.heads * HEAD_DIM
    return (
        noise(seed, 0, (*shape, case.heads, HEAD_DIM), jnp.float32),
        noise(seed, 1, (*shape, width), jnp.bfloat16),
        1 + 0.1 * noise(seed, 2, (HEAD_DIM,), jnp.float32),
    )


def benchmarks() -> Sequence[Benchmark]:
    """The normed heads of a call are the next call's."""
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case),
            functools.partial(gated_norm_rounded if case.rounded else gated_norm, eps=EPS),
            _feed,
            flops=10 * case.rows * case.groups * case.heads * HEAD_DIM,
        )
        for case in BENCHMARK_CASES
    ]


def _feed(arguments: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    x, *rest = arguments
    normed = output[0] if isinstance(output, tuple) else output
    return normed.astype(jnp.float32).reshape(x.shape), *rest
