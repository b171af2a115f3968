"""Shapes of expert_product that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.activations import Clamp
from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference, noise
from pallas_kernels.expert_product import expert_product

CLAMP = Clamp(1.702, 1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` that choose ``k`` of ``num_experts``.

    ``biased``: with biases and CLAMP. ``missing``: of so many further experts, which other devices
    have.
    """

    rows: int
    k: int
    num_experts: int
    hidden: int
    units: int
    biased: bool = False
    missing: int = 0

    def __str__(self) -> str:
        biases = ", biases" if self.biased else ""
        sizes = f"{self.k} of {self.num_experts} x {self.hidden} x {self.units}"
        return f"{self.rows} rows, {sizes}{biases}{', others' if self.missing else ''}"

    @property
    def clamp(self) -> Clamp | None:
        return CLAMP if self.biased else None

    @property
    def num_chosen(self) -> int:
        """Experts of seed 0 that are chosen by any row."""
        chosen = np.unique(chosen_experts(self))
        return int(np.sum(chosen < self.num_experts))

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: the chosen experts, rows, hidden units twice, results."""
        weights = 2 * 3 * self.num_chosen * self.hidden * self.units
        pairs = self.rows * self.k
        return weights + 2 * self.rows * self.hidden + pairs * (4 * self.units + 4 * self.hidden)


TEST_CASES = (
    Case(3, 2, 8, 128, 64),
    Case(8, 3, 6, 192, 128, biased=True),
    Case(12, 3, 5, 128, 192, biased=True, missing=3),
    Case(40, 4, 6, 256, 128),
    Case(64, 8, 32, 128, 64),
    Case(2, 2, 3, 1280, 1280, missing=2),
)
# A layer of Qwen3-30B-A3B.
BENCHMARK_CASES = tuple(Case(rows, 8, 128, 2048, 768) for rows in (1, 2, 4, 8, 16, 32, 128))


def chosen_experts(case: Case, seed: int = 0) -> np.ndarray:
    """int32 [rows, k], distinct in each row; ``num_experts`` for those of other devices."""
    order = np.random.default_rng(seed).random((case.rows, case.num_experts + case.missing))
    ids = np.argsort(order, axis=1)[:, : case.k]
    return np.minimum(ids, case.num_experts).astype(np.int32)


def make_arguments(
    case: Case, dtype: Any = jnp.bfloat16, seed: int = 0
) -> tuple[Array, Array, Array, Array, Any]:
    """Positional arguments of expert_product."""
    inner = (case.hidden, 2, case.units)
    gate_up = noise(seed, 1, (case.num_experts, *inner), dtype) * case.hidden**-0.5
    down = noise(seed, 2, (case.num_experts, case.units, case.hidden), dtype) * case.units**-0.5
    bias = noise(seed, 3, (case.num_experts, 2, case.units), dtype) if case.biased else None
    return (
        noise(seed, 0, (case.rows, case.hidden), dtype),
        jnp.asarray(chosen_experts(case, seed)),
        gate_up.astype(dtype),
        down.astype(dtype),
        bias,
    )


def benchmarks() -> Sequence[Benchmark]:
    made = (
        beside_reference(
            case,
            functools.partial(make_arguments, case, jnp.bfloat16),
            functools.partial(expert_product, clamp=case.clamp),
            _feed,
            flops=6 * case.rows * case.k * case.hidden * case.units,
        )
        for case in BENCHMARK_CASES
    )
    return [dataclasses.replace(benchmark, reference_seconds=1e-4) for benchmark in made]


def _feed(arguments: Arguments, output: Array) -> Arguments:
    """x depends on the output, and is nearly as before."""
    x, *rest = arguments
    assert x is not None
    return (x + 1e-6 * output[:, 0].astype(x.dtype), *rest)
