"""Shapes of packed_product that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, implementation_to_time, noise
from pallas_kernels.packed_product import packed_product
from pallas_kernels.packed_product.reference import packed_product_reference
from pallas_kernels.packed_product.tuning import choose_packed_splits

# Of a layer of Llama-3.1-8B: name -> inputs, outputs.
SHAPES = {
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "qkv": (4096, 6144),
    "o": (4096, 4096),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` of ``depth`` inputs times ``width`` outputs; ``group`` inputs share a scale."""

    rows: int
    depth: int
    width: int
    group: int = 128
    zeros: bool = False
    num_splits: int = 1

    def __str__(self) -> str:
        zeros = ", zeros" if self.zeros else ""
        splits = f", {self.num_splits} parts" if self.num_splits > 1 else ""
        return f"{self.rows} x {self.depth} x {self.width}, groups of {self.group}{zeros}{splits}"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: weights, scales, zeros, x and partial sums."""
        scales = (2 + 2 * self.zeros) * self.depth // self.group * self.width
        results = 4 * self.num_splits * self.rows * self.width
        return self.depth * self.width // 2 + scales + 2 * self.rows * self.depth + results


TEST_CASES = (
    Case(2, 256, 128),
    Case(5, 512, 256, group=64, zeros=True, num_splits=2),
    Case(13, 512, 128, group=512, num_splits=2),
    Case(64, 1024, 256, zeros=True),
)
BENCHMARK_CASES = tuple(
    Case(rows, *SHAPES[name], num_splits=choose_packed_splits(*SHAPES[name], 128))
    for name in SHAPES
    for rows in (2, 6, 16, 48, 64)
)


def make_arguments(
    case: Case, dtype: Any = jnp.bfloat16, seed: int = 0
) -> tuple[Array, Array, Array, Any]:
    """Positional arguments of packed_product."""
    groups = case.depth // case.group
    values, zero = (jax.random.fold_in(jax.random.key(seed), index) for index in (1, 2))
    integers = jax.random.randint(values, (case.width, case.depth), -8, 8, jnp.int8)
    zeros = jax.random.randint(zero, (groups, case.width), -8, 8).astype(dtype)
    scale = 0.2 * case.depth**-0.5 * (1 + 0.1 * noise(seed, 3, (groups, case.width), jnp.float32))
    return (
        noise(seed, 0, (case.rows, case.depth), dtype),
        integers.astype(jnp.int4),
        scale.astype(dtype),
        zeros if case.zeros else None,
    )


def benchmarks() -> Sequence[Benchmark]:
    return [_benchmark(case) for case in BENCHMARK_CASES]


def _benchmark(case: Case) -> Benchmark:
    implementation = implementation_to_time()
    options: dict[str, Any] = {"num_splits": case.num_splits}
    return Benchmark(
        name=str(case),
        make_arguments=lambda seed: make_arguments(case, jnp.bfloat16, seed),
        call=functools.partial(packed_product, **options, implementation=implementation),
        reference=functools.partial(
            packed_product_reference, **options, dtype=jnp.dtype("float32")
        ),
        feed=_feed,
        num_bytes=case.num_bytes,
        flops=2 * case.rows * case.depth * case.width,
        implementation=implementation,
    )


def _feed(arguments: Arguments, output: Array) -> Arguments:
    """x depends on the output, and is nearly as before."""
    x, *rest = arguments
    assert x is not None
    return (x + 1e-6 * output[0, :, :1].astype(x.dtype), *rest)
