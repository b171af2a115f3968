"""Shapes of packed_float_product for tests and benchmarks, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference, noise
from pallas_kernels.packed_expert_product.cases import random_weights
from pallas_kernels.packed_experts import FORMATS, Format, PackedExperts
from pallas_kernels.packed_float_product import packed_float_product
from pallas_kernels.packed_product.cases import SHAPES


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` of ``depth`` inputs times ``width`` outputs, in a format of FORMATS."""

    rows: int
    depth: int
    width: int
    form: str = "nvfp4"

    def __str__(self) -> str:
        return f"{self.form}: {self.rows} x {self.depth} x {self.width}"

    @property
    def stored(self) -> Format:
        return FORMATS[self.form]

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: weights with their scales, x, results in float32."""
        weights = self.depth * self.width
        factors = 4 * self.width * self.stored.has_factor
        return (
            weights // 2
            + weights // self.stored.block[1]
            + factors
            + self.rows * (2 * self.depth + 4 * self.width)
        )


TEST_CASES = (
    Case(3, 256, 64),
    Case(1, 192, 128, "mxfp4"),
    Case(8, 320, 192),
    Case(13, 256, 256, "mxfp4"),
    Case(40, 384, 128),
    Case(100, 256, 192),
    Case(70, 128, 64, "mxfp4"),
)
BENCHMARK_CASES = tuple(
    Case(rows, *sizes, form)
    for form in ("nvfp4", "mxfp4")
    for sizes in SHAPES.values()
    for rows in (1, 6, 16, 32, 64, 192)
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Array, PackedExperts]:
    """Positional arguments of packed_float_product."""
    x = noise(seed, 0, (case.rows, case.depth), jnp.bfloat16)
    return x, random_weights(case.stored, seed, 1, (1, 1, case.width), case.depth)


def benchmarks() -> Sequence[Benchmark]:
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case),
            packed_float_product,
            _feed,
            flops=2 * case.rows * case.depth * case.width,
        )
        for case in BENCHMARK_CASES
    ]


def _feed(arguments: Arguments, output: Array) -> Arguments:
    """x depends on the output, and is nearly as before."""
    x, weights = arguments
    assert x is not None
    return x + 1e-6 * output[:, :1].astype(x.dtype), weights
