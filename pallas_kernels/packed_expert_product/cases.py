"""Shapes of packed_expert_product for tests and benchmarks, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference, noise
from pallas_kernels.expert_product import cases
from pallas_kernels.packed_expert_product import packed_expert_product
from pallas_kernels.packed_expert_product.order import stored_order
from pallas_kernels.packed_experts import Code, PackedExperts

BLOCKS = {"e4m3": (128, 128), "e2m1": (1, 32), "int4": (1, 32)}  # as most are published


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """As of expert_product, of numbers of ``code``."""

    code: Code = "e4m3"

    def __str__(self) -> str:
        return f"{self.code}: {super().__str__()}"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: the chosen experts, rows, hidden units twice, results."""
        numbers, (outputs, inputs) = 3 * self.num_chosen * self.hidden * self.units, self.block
        scales = numbers // (outputs * inputs) * {"e4m3": 4, "e2m1": 1, "int4": 2}[self.code]
        pairs = self.rows * self.k
        other = 2 * self.rows * self.hidden + pairs * (4 * self.units + 4 * self.hidden)
        return numbers * (8 if self.code == "e4m3" else 4) // 8 + scales + other

    @property
    def block(self) -> tuple[int, int]:
        return BLOCKS[self.code]


TEST_CASES = (
    Case(3, 2, 8, 128, 64, code="e4m3"),
    Case(8, 3, 6, 192, 128, biased=True, code="e4m3"),
    Case(12, 3, 5, 320, 192, missing=3, code="e4m3"),
    Case(40, 4, 6, 256, 128, code="e4m3"),
    Case(3, 2, 8, 256, 64, code="e2m1"),
    Case(8, 3, 6, 192, 128, biased=True, code="e2m1"),
    Case(40, 4, 6, 320, 192, biased=True, missing=3, code="e2m1"),
    Case(3, 2, 8, 256, 64, code="int4"),
    Case(8, 3, 6, 192, 128, biased=True, code="int4"),
    Case(40, 4, 6, 320, 192, missing=3, code="int4"),
)
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
# A layer of Qwen3.6-35B-A3B, of gpt-oss-20b, and of Kimi K2 with a twelfth of its experts.
BENCHMARK_CASES = (
    *(Case(rows, 8, 256, 2048, 512, code="e4m3") for rows in ROWS),
    *(Case(rows, 8, 256, 2048, 512, code="e2m1") for rows in ROWS),
    *(Case(rows, 4, 32, 2880, 2880, biased=True, code="e2m1") for rows in ROWS),
    *(Case(rows, 8, 32, 7168, 2048, code="int4") for rows in ROWS),
)


def make_arguments(
    case: Case, seed: int = 0
) -> tuple[Array, Array, PackedExperts, PackedExperts, Any]:
    """Positional arguments of packed_expert_product."""
    shape = (case.num_experts, 2, case.units)
    bias = noise(seed, 3, shape, jnp.bfloat16) if case.biased else None
    return (
        noise(seed, 0, (case.rows, case.hidden), jnp.bfloat16),
        jnp.asarray(cases.chosen_experts(case, seed)),
        _weights(case, seed, 1, (case.num_experts, 2, case.units), case.hidden),
        _weights(case, seed, 2, (case.num_experts, 1, case.hidden), case.units),
        bias,
    )


def _weights(
    case: Case, seed: int, index: int, outputs: tuple[int, ...], depth: int
) -> PackedExperts:
    """Random bytes, with scales that make the outputs about 1."""
    bits = 8 if case.code == "e4m3" else 4
    shape = (*outputs, depth * bits // 8)
    values = np.random.default_rng([seed, index, 1]).integers(0, 256, shape, np.uint8)
    if case.code == "e4m3":
        values -= values & 127 == 127  # no NaN
    return PackedExperts(
        values=stored_order(jnp.asarray(values), case.code),
        scale=_scales(case, seed, index, outputs, depth),
        factor=None,
        code=case.code,
        block=case.block,
    )


def _scales(case: Case, seed: int, index: int, outputs: tuple[int, ...], depth: int) -> Array:
    experts, parts, width = outputs
    rows, columns = case.block
    if case.code == "e4m3":
        shape = (experts, parts, -(-width // rows), -(-depth // columns))
        return jnp.abs(noise(seed, 10 + index, shape)) * depth**-0.5 / 128
    shape = (experts, parts, depth // columns, width)
    floats = jnp.abs(noise(seed, 10 + index, shape)) * depth**-0.5 / 3
    if case.code == "int4":
        return floats.astype(jnp.bfloat16)
    return jnp.clip(127 + jnp.round(jnp.log2(floats + 2.0**-20)), 1, 254).astype(jnp.uint8)


def benchmarks() -> Sequence[Benchmark]:
    made = (
        beside_reference(
            case,
            functools.partial(make_arguments, case),
            functools.partial(packed_expert_product, clamp=case.clamp),
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
