"""Shapes of resident_product that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, implementation_to_time, noise
from pallas_kernels.packed_product.reference import packed_product_reference
from pallas_kernels.packed_product.resident.tuning import (
    DEFAULT,
    MULTIPROCESSORS,
    VARIANTS,
    ProductTuning,
    choose_num_splits,
)

HALF = 8  # of the 16 integers of 4 bits


@dataclasses.dataclass(frozen=True)
class Case:
    """[rows, depth] times [width, depth] of 4 bits, with a scale for each ``group`` inputs."""

    rows: int
    depth: int
    width: int
    group: int = 128
    zeros: bool = False
    splits: int = 0  # 0: the chosen number
    scale_dtype: Any = jnp.bfloat16
    name: str = ""

    def __str__(self) -> str:
        zeros = ", zeros" if self.zeros else ""
        name = self.name or f"{self.width} x {self.depth}"
        return f"{self.rows} rows, {name}, groups of {self.group}{zeros}"

    @property
    def num_splits(self) -> int:
        return self.splits or choose_num_splits(self.rows, self.depth, self.width)

    @property
    def max_error(self) -> float:
        """Most error of a partial sum, as a share of the sum of its products' magnitudes.

        Products and scaled weights are exact in float32. Each 16 inputs are added to a group's sum,
        and each group to the total, with errors of at most two units of the last place.
        """
        depth = self.depth // self.num_splits
        return 2.0**-22 * (depth / 16 + depth / min(self.group, depth) + 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and scales, of the rows and of the partial sums."""
        scales = 2 * self.width * self.depth // self.group * (2 if self.zeros else 1)
        results = 4 * self.num_splits * self.rows * self.width
        return self.width * self.depth // 2 + scales + 2 * self.rows * self.depth + results


TEST_CASES = (
    Case(5, 1024, 192, 128, zeros=True, splits=2),
    Case(1, 256, 64, 256, scale_dtype=jnp.float16),
    Case(16, 1024, 128, 128),
    Case(17, 512, 128, 64, zeros=True),
    Case(30, 1024, 64, 32, splits=2),
    Case(8, 768, 64, 768, splits=3),
    Case(48, 7168, 128, 64, splits=7, scale_dtype=jnp.float16),
    Case(64, 2048, 64 * (MULTIPROCESSORS + 1), 64, zeros=True, splits=2),
)
LLAMA_8B = {  # outputs and inputs of Llama-3.1-8B's projections
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "LM head": (128256, 4096),
}
BENCHMARK_CASES = tuple(
    Case(rows, depth, width, name=name)
    for name, (width, depth) in LLAMA_8B.items()
    for rows in (1, 8, 16, 64)
) + tuple(
    Case(6, 4096, 28672, group, zeros, name="gate and up")
    for group, zeros in ((32, False), (64, False), (128, True), (4096, False))
)


TUNED_CASES = tuple(case for case in BENCHMARK_CASES if case.rows in (8, 16))[:8]


def make_arguments(
    case: Case, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Array, Array, Array, Array | None]:
    """Positional arguments of packed_product. Scales keep the products' size near 1."""
    groups = (case.depth // case.group, case.width)
    scale = case.depth**-0.5 / 4 * (1 + 0.5 * jnp.tanh(noise(seed, 1, groups)))
    return (
        noise(seed, 0, (case.rows, case.depth), dtype),
        _integers(seed, 2, (case.width, case.depth), jnp.int4),
        scale.astype(case.scale_dtype),
        _integers(seed, 3, groups, jnp.bfloat16) if case.zeros else None,
    )


def argument_shapes(case: Case, dtype: Any) -> tuple[Any, ...]:
    """The shapes of ``make_arguments``, without making any."""
    groups = (case.depth // case.group, case.width)
    return (
        jax.ShapeDtypeStruct((case.rows, case.depth), dtype),
        jax.ShapeDtypeStruct((case.width, case.depth), jnp.int4),
        jax.ShapeDtypeStruct(groups, case.scale_dtype),
        jax.ShapeDtypeStruct(groups, jnp.bfloat16) if case.zeros else None,
    )


def _integers(seed: int, index: int, shape: tuple[int, int], dtype: Any) -> Array:
    """All integers of 4 bits, equally likely; made where ``noise`` is."""
    if jax.default_backend() == "cpu":
        rng = np.random.default_rng([seed, index])
        return jnp.asarray(rng.integers(-HALF, HALF, shape, np.int8)).astype(dtype)
    key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
    return jax.random.randint(key, shape, -HALF, HALF, jnp.int8).astype(dtype)


def benchmarks() -> Sequence[Benchmark]:
    """All cases on a GPU, some of them with other tunings; none elsewhere."""
    if implementation_to_time() == "reference":
        return []
    tuned = [_benchmark(case, one) for case in TUNED_CASES for one in VARIANTS[1:]]
    return [_benchmark(case, DEFAULT) for case in BENCHMARK_CASES] + tuned


def _benchmark(case: Case, config: ProductTuning) -> Benchmark:
    splits = case.num_splits
    module = importlib.import_module("pallas_kernels.packed_product.resident.kernel")
    return Benchmark(
        name=f"{case}; {config}",
        make_arguments=lambda seed: make_arguments(case, jnp.bfloat16, seed),
        call=functools.partial(module.resident_product, num_splits=splits, config=config),
        reference=functools.partial(_reference, num_splits=splits),
        feed=_feed,
        num_bytes=case.num_bytes,
        flops=2 * case.rows * case.depth * case.width,
        implementation="mosaic_gpu",
    )


def _reference(
    x: Array, values: Array, scale: Array, zero: Array | None, *, num_splits: int
) -> Array:
    dtype = jnp.dtype("float32")
    return packed_product_reference(x, values, scale, zero, num_splits=num_splits, dtype=dtype)


def _feed(arguments: Arguments, output: Array) -> Arguments:
    """The next call's rows depend on the sums, which are far below their last bit."""
    x, *weights = arguments
    assert x is not None
    return (x + (1e-30 * output[0, :, :1]).astype(x.dtype), *weights)
