"""Shapes of expert_gate_up_down that tests and benchmarks share, and random arguments for them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference
from pallas_kernels.expert_gate_up_down import expert_gate_up_down
from pallas_kernels.expert_slots import make_slots
from pallas_kernels.packed_expert_product import cases
from pallas_kernels.packed_expert_product.cases import Case

TEST_CASES = (
    Case(1, 2, 8, 512, 128),
    Case(3, 2, 8, 1024, 384),
    Case(8, 3, 6, 2048, 512, missing=3),
    Case(4, 3, 6, 1024, 384, missing=3, form="mxfp8"),
    Case(8, 3, 6, 2048, 512, form="mxfp4"),
)
# A layer of Qwen3.6-35B-A3B.
BENCHMARK_CASES = tuple(
    Case(rows, 9, 257, 2048, 512, form=form) for form in ("fp8", "mxfp4") for rows in (1, 2, 4, 8)
)


def make_arguments(case: Case, seed: int = 0) -> Arguments:
    """Positional arguments of expert_gate_up_down, but for where blocks meet."""
    x, experts, gate_up, down, _ = cases.make_arguments(case, seed)
    return x, experts, make_slots(experts, gate_up.num_experts), gate_up, down


def benchmarks() -> Sequence[Benchmark]:
    """All calls meet in the same place."""

    def arguments(seed: int, case: Case) -> Arguments:
        return *make_arguments(case, seed), jnp.zeros((1, 1), jnp.int32)

    def run(*arguments: Any, implementation: Any) -> Array:
        return expert_gate_up_down(*arguments, implementation=implementation).by_pair

    def feed(arguments: Arguments, output: Array) -> Arguments:
        x, *rest = arguments
        return x + 1e-6 * output[:, 0].astype(x.dtype), *rest

    return [
        beside_reference(
            case,
            functools.partial(arguments, case=case),
            run,
            feed,
            flops=6 * case.rows * case.k * case.hidden * case.units,
        )
        for case in BENCHMARK_CASES
    ]
