"""Shapes of o_gate_up_down that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference, noise
from pallas_kernels.o_gate_up_down import o_gate_up_down
from pallas_kernels.o_gate_up_down.plan import GROUP
from pallas_kernels.o_gate_up_down.weights import LayerWeights, PackedWeights
from pallas_kernels.packed_product import cases as packed_cases

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    inputs: int
    hidden: int
    units: int
    zeros: bool = False
    float8: bool = False
    groups: bool = False  # of e4m3

    def __str__(self) -> str:
        kind = ", zeros" if self.zeros else ""
        if self.float8:
            kind = ", e4m3 in groups" if self.groups else ", e4m3"
        return f"{self.rows} x {self.inputs} x {self.hidden} x {self.units}{kind}"

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and their scales, and of rows."""
        weights, rows = self.hidden * (self.inputs + 3 * self.units), self.inputs + 4 * self.hidden
        if self.float8:
            return weights + 2 * self.rows * rows
        factors = (2 + 2 * self.zeros) * weights // GROUP
        return weights // 2 + factors + 2 * self.rows * rows


TEST_CASES = (
    Case(2, 1024, 1024, 1536),
    Case(5, 512, 1024, 512, zeros=True),
    Case(8, 2048, 1024, 4608),
    Case(3, 1536, 1024, 2560, float8=True),
    Case(8, 1024, 2048, 4608, float8=True),
    Case(5, 1536, 1024, 4608, float8=True, groups=True),
)
BENCHMARK_CASES = tuple(
    Case(rows, 4096, 4096, 14336, float8=float8) for float8 in (False, True) for rows in (1, 2, 8)
)


def make_arguments(case: Case, dtype: Any = jnp.bfloat16, seed: int = 0) -> Arguments:
    """Positional arguments of o_gate_up_down, without eps."""

    def weights(index: int, width: int, depth: int) -> PackedWeights:
        group = depth if case.float8 and not case.groups else GROUP
        product = packed_cases.Case(1, depth, width, group, case.zeros, float8=case.float8)
        _, *packed, _ = packed_cases.make_arguments(product, dtype, seed + index)
        return PackedWeights(*packed)

    return (
        noise(seed, 4, (case.rows, case.inputs), dtype),
        noise(seed, 5, (case.rows, case.hidden), dtype),
        LayerWeights(
            1 + 0.1 * noise(seed, 6, (case.hidden,), dtype),
            weights(1, case.hidden, case.inputs),
            weights(2, 2 * case.units, case.hidden),
            weights(3, case.hidden, case.units),
        ),
    )


def benchmarks() -> Sequence[Benchmark]:
    """A call's x depends on the stream that the call before it returned, and is nearly as before.
    All calls meet in the same place."""

    def arguments(seed: int, case: Case) -> Arguments:
        return *make_arguments(case, seed=seed), jnp.zeros(1, jnp.int32)

    def run(
        x: Array, residual: Array, weights: LayerWeights, meeting: Array, implementation: Any
    ) -> tuple[Array, Array]:
        return o_gate_up_down(x, residual, weights, EPS, implementation, meeting)

    def feed(arguments: Arguments, output: tuple[Array, Array]) -> Arguments:
        x, *rest = arguments
        return x + 1e-6 * output[0][:, :1], *rest

    return [
        beside_reference(
            case,
            functools.partial(arguments, case=case),
            run,
            feed,
            flops=2 * case.rows * case.hidden * (case.inputs + 3 * case.units),
        )
        for case in BENCHMARK_CASES
    ]
