"""Shapes of add_rms_norm that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.benchmark import Benchmark, beside_reference, noise
from pallas_kernels.chosen_products import ChosenProducts

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` rows of ``hidden`` entries. With ``num_splits`` above 1 the products are float32.
    With ``choices`` above 0 products of so many experts are added to each row."""

    rows: int
    hidden: int
    num_splits: int = 1
    choices: int = 0

    def __str__(self) -> str:
        if self.choices:
            return f"{self.rows} x {self.hidden}, {self.choices} experts"
        partials = f", {self.num_splits} partial sums" if self.num_splits > 1 else ""
        return f"{self.rows} x {self.hidden}{partials}"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: rows, partial sums, weights, sums and normed sums."""
        partial_bytes = 2 if self.num_splits == 1 else 4 * self.num_splits
        partial_bytes = 4 * self.choices or partial_bytes
        return self.hidden * (2 + self.rows * (6 + partial_bytes))


TEST_CASES = (
    *(Case(1, 256), Case(5, 768), Case(6, 4096), Case(2, 4096, 8), Case(3, 16384, 2)),
    *(Case(3, 512, choices=3), Case(2, 2048, choices=9)),
)
BENCHMARK_CASES = (
    *(Case(rows, 4096) for rows in (1, 6, 48, 192, 2048)),
    *(Case(rows, 4096, splits) for rows, splits in ((6, 4), (48, 4), (48, 8))),
    *(Case(rows, 2048, choices=9) for rows in (2, 8, 32)),
)


def make_arguments(
    case: Case, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Array, Array | ChosenProducts, Array]:
    """Positional arguments of add_rms_norm, without eps."""
    shape = (case.rows, case.hidden)
    partial_dtype = dtype if case.num_splits == 1 else jnp.float32
    padded = (case.num_splits, case.rows + (case.rows == 1), case.hidden)
    if case.choices:
        partials = _chosen(case, seed)
    else:
        partials = noise(seed, 1, padded, partial_dtype)
    return noise(seed, 0, shape, dtype), partials, 1 + 0.1 * noise(seed, 2, shape[1:], dtype)


def _chosen(case: Case, seed: int) -> ChosenProducts:
    """The products of a case, twice as many as there are choices; a tenth of these have none."""
    rng, shape = np.random.default_rng(seed), (case.rows, case.choices)
    count = 2 * case.rows * case.choices
    places = rng.permutation(count)[: count // 2].reshape(shape)
    places = np.where(rng.random(shape) < 0.1, -1, places).astype(np.int32)
    weights = rng.random(shape).astype(np.float32)
    products = noise(seed, 1, (count, case.hidden), jnp.float32)
    return ChosenProducts(products, jnp.asarray(places), jnp.asarray(weights))


def benchmarks() -> Sequence[Benchmark]:
    """The normed sum of a call is the next call's x."""
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case, jnp.bfloat16),
            functools.partial(add_rms_norm, eps=EPS),
            lambda arguments, output: (output[1], *arguments[1:]),
            flops=5 * case.rows * case.hidden,
        )
        for case in BENCHMARK_CASES
    ]
