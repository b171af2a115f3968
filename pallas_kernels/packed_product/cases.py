"""Shapes of packed_product that tests and benchmarks share, and random arguments for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.benchmark import Arguments, Benchmark, beside_reference, noise
from pallas_kernels.packed_product import packed_product
from pallas_kernels.packed_product.tuning import choose_packed_splits
from pallas_kernels.round_tokens import round_tokens

# Of a layer of Llama-3.1-8B: name -> inputs, outputs.
SHAPES = {
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "qkv": (4096, 6144),
    "o": (4096, 4096),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """``rows`` of ``depth`` inputs times ``width`` outputs; ``group`` inputs share a scale.

    ``float8``: x and the weights are e4m3, instead of bfloat16 and int4; ``rounds``: x alone is.
    """

    rows: int
    depth: int
    width: int
    group: int = 128
    zeros: bool = False
    num_splits: int = 1
    float8: bool = False
    rounds: bool = False

    def __str__(self) -> str:
        zeros = ", zeros" if self.zeros else ""
        splits = f", {self.num_splits} parts" if self.num_splits > 1 else ""
        kind = "e4m3, " if self.float8 else "e4m3 x, " if self.rounds else ""
        sizes = f"{self.rows} x {self.depth} x {self.width}"
        return f"{kind}{sizes}, groups of {self.group}{zeros}{splits}"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: weights, scales, zeros, x and partial sums."""
        scales = (2 + 2 * self.zeros) * self.depth // self.group * self.width
        results = 4 * self.num_splits * self.rows * self.width
        weights = self.depth * self.width // (1 if self.float8 else 2)
        return weights + scales + self.x_bits // 8 * self.rows * self.depth + results

    @property
    def weight_bits(self) -> int:
        return 8 if self.float8 else 4

    @property
    def x_bits(self) -> int:
        return 8 if self.float8 or self.rounds else 16


TEST_CASES = (
    Case(2, 384, 128),
    Case(5, 512, 256, group=64, zeros=True, num_splits=2),
    Case(13, 512, 128, group=512, num_splits=2),
    Case(16, 512, 128, group=32, zeros=True),
    Case(64, 1024, 256, zeros=True),
    Case(3, 768, 128, group=384),
    Case(100, 512, 128, group=32, zeros=True, num_splits=2),
    Case(2, 256, 128, group=256, float8=True),
    Case(13, 512, 256, num_splits=2, float8=True),
    Case(3, 512, 128, rounds=True),
    Case(40, 512, 256, group=256, num_splits=2, rounds=True),
    Case(130, 512, 256, num_splits=2, rounds=True),
    Case(200, 512, 128, num_splits=2),
    Case(390, 512, 256, rounds=True),
)


def _timed_case(name: str, rows: int, x_bits: int = 16, *, float8: bool = False) -> Case:
    sizes = (rows, *SHAPES[name])
    return Case(
        *sizes,
        group=SHAPES[name][0] if float8 else 128,
        num_splits=choose_packed_splits(*sizes, 8 if float8 else 4, x_bits),
        float8=float8,
        rounds=x_bits == 8 and not float8,
    )


BENCHMARK_CASES = (
    *(_timed_case(name, rows) for name in SHAPES for rows in (2, 6, 16, 32, 48, 64, 192, 512)),
    *(_timed_case(name, rows, 8, float8=True) for name in SHAPES for rows in (2, 16, 48, 64)),
    *(_timed_case(name, rows, 8) for name in SHAPES for rows in (2, 16, 32, 48, 64, 192, 512)),
)


def make_arguments(
    case: Case, dtype: Any = jnp.bfloat16, seed: int = 0
) -> tuple[Array, Array, Array, Any, Any]:
    """Positional arguments of packed_product."""
    groups = case.depth // case.group
    if case.float8:
        return _float8_arguments(case, dtype, seed)
    values, zero = (jax.random.fold_in(jax.random.key(seed), index) for index in (1, 2))
    integers = jax.random.randint(values, (case.width, case.depth), -8, 8, jnp.int8)
    zeros = jax.random.randint(zero, (groups, case.width), -8, 8).astype(dtype)
    scale = 0.2 * case.depth**-0.5 * (1 + 0.1 * noise(seed, 3, (groups, case.width), jnp.float32))
    x, x_scale = noise(seed, 0, (case.rows, case.depth), dtype), None
    if case.rounds:
        x, x_scale = round_tokens(x)
    weights = integers.astype(jnp.int4), scale.astype(dtype), zeros if case.zeros else None
    return x, *weights, x_scale


def _float8_arguments(case: Case, dtype: Any, seed: int) -> tuple[Array, Array, Array, Any, Any]:
    groups = case.depth // case.group
    x, x_scale = round_tokens(noise(seed, 0, (case.rows, case.depth), dtype), groups)
    values, scale = round_tokens(noise(seed, 1, (case.width, case.depth), dtype), groups)
    return x, values, case.depth**-0.5 * scale[:, : case.width], None, x_scale


def benchmarks() -> Sequence[Benchmark]:
    return [
        beside_reference(
            case,
            functools.partial(make_arguments, case, jnp.bfloat16),
            functools.partial(packed_product, num_splits=case.num_splits),
            functools.partial(_feed, scaled=case.x_bits == 8),
            flops=2 * case.rows * case.depth * case.width,
        )
        for case in BENCHMARK_CASES
    ]


def _feed(arguments: Arguments, output: Array, *, scaled: bool) -> Arguments:
    """x or its scale depends on the output, and is nearly as before."""
    x, *rest, x_scale = arguments
    if scaled:
        assert x_scale is not None
        return (x, *rest, x_scale + 1e-12 * output[0, 0, 0])
    assert x is not None
    return (x + 1e-6 * output[0, :, :1].astype(x.dtype), *rest, x_scale)
