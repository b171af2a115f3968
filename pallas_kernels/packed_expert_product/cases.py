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
from pallas_kernels.packed_expert_product.scales import with_e5m3_scales
from pallas_kernels.packed_experts import BIAS, FORMATS, Format, PackedExperts
from pallas_kernels.packed_order import stored_order

TENSOR_SCALE = 2.0**-6  # about the factors of NVFP4, whose scales are about 1


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """A case of expert_product, in a format of FORMATS."""

    form: str = "fp8"

    def __str__(self) -> str:
        return f"{self.form}: {super().__str__()}"

    @property
    def stored(self) -> Format:
        return FORMATS[self.form]

    @property
    def num_bytes(self) -> int:
        """Bytes read and written: the chosen experts, rows, hidden units twice, results."""
        numbers = 3 * self.num_chosen * self.hidden * self.units
        (outputs, inputs), bits = self.stored.block, self.stored.bits
        size = jnp.dtype(self.stored.scale_dtype).itemsize + 2 * self.stored.has_zero
        scales = numbers // (outputs * inputs) * size
        pairs = self.rows * self.k
        other = 2 * self.rows * self.hidden + pairs * (4 * self.units + 4 * self.hidden)
        return numbers * bits // 8 + scales + other


TEST_CASES = (
    Case(3, 2, 8, 128, 64, form="fp8"),
    Case(8, 3, 6, 192, 128, biased=True, form="fp8"),
    Case(12, 3, 5, 320, 192, missing=3, form="fp8"),
    Case(40, 4, 6, 256, 128, form="fp8"),
    Case(3, 2, 8, 128, 64, form="mxfp8"),
    Case(8, 3, 6, 192, 128, biased=True, form="mxfp8"),
    Case(40, 4, 6, 320, 192, missing=3, form="mxfp8"),
    Case(3, 2, 8, 256, 64, form="mxfp4"),
    Case(8, 3, 6, 192, 128, biased=True, form="mxfp4"),
    Case(40, 4, 6, 320, 192, biased=True, missing=3, form="mxfp4"),
    Case(3, 2, 8, 256, 64, form="nvfp4"),
    Case(8, 3, 6, 192, 128, biased=True, form="nvfp4"),
    Case(40, 4, 6, 320, 192, missing=3, form="nvfp4"),
    Case(3, 2, 8, 256, 64, form="int4"),
    Case(8, 3, 6, 192, 128, biased=True, form="int4"),
    Case(40, 4, 6, 320, 192, missing=3, form="int4"),
    Case(3, 2, 8, 256, 128, form="int4-zeros"),
    Case(8, 3, 6, 128, 384, biased=True, form="int4-zeros"),
    Case(40, 4, 6, 384, 256, missing=3, form="int4-zeros"),
)
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
# A layer of Qwen3.6-35B-A3B, of gpt-oss-20b, and of Kimi K2 with a twelfth of its experts.
BENCHMARK_CASES = (
    *(Case(rows, 8, 256, 2048, 512, form="fp8") for rows in ROWS),
    *(Case(rows, 8, 256, 2048, 512, form="mxfp8") for rows in ROWS),
    *(Case(rows, 8, 256, 2048, 512, form="mxfp4") for rows in ROWS),
    *(Case(rows, 8, 256, 2048, 512, form="nvfp4") for rows in ROWS),
    *(Case(rows, 4, 32, 2880, 2880, biased=True, form="mxfp4") for rows in ROWS),
    *(Case(rows, 8, 32, 7168, 2048, form="int4") for rows in ROWS),
    *(Case(rows, 8, 256, 2048, 512, form="int4-zeros") for rows in ROWS),
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
        random_weights(case.stored, seed, 1, (case.num_experts, 2, case.units), case.hidden),
        random_weights(case.stored, seed, 2, (case.num_experts, 1, case.hidden), case.units),
        bias,
    )


def random_weights(
    stored: Format, seed: int, index: int, outputs: tuple[int, ...], depth: int
) -> PackedExperts:
    """Random bytes, with scales that make the outputs about 1: those of ``index`` of a seed.

    ``outputs``: experts, parts, outputs of a part.
    """
    shape = (*outputs, depth * stored.bits // 8)
    values = np.random.default_rng([seed, index, 1]).integers(0, 256, shape, np.uint8)
    if stored.code == "e4m3":
        values -= values & 127 == 127  # no NaN
    numbers, factor, zero = jnp.asarray(values), None, None
    scale = _scales(stored, seed, index, outputs, depth)
    if stored.scale_code == "e5m3":
        numbers, scale = with_e5m3_scales(numbers, jnp.swapaxes(scale, -1, -2))
        scale = jnp.swapaxes(scale, -1, -2)
        factor = (1 + 0.1 * noise(seed, 20 + index, outputs)) * TENSOR_SCALE
    if stored.has_zero:
        zeros = np.random.default_rng([seed, index, 2]).integers(-8, 9, scale.shape)
        zero = jnp.asarray(zeros + BIAS, jnp.bfloat16)
    return PackedExperts(
        values=stored_order(numbers, stored.code),
        scale=scale,
        factor=factor,
        code=stored.code,
        block=stored.block,
        scale_code=stored.scale_code,
        zero=zero,
    )


def _scales(stored: Format, seed: int, index: int, outputs: tuple[int, ...], depth: int) -> Array:
    """Scales as files have them, groups before outputs."""
    experts, parts, width = outputs
    rows, columns = stored.block
    if rows > 1:
        shape = (experts, parts, -(-width // rows), -(-depth // columns))
        return jnp.abs(noise(seed, 10 + index, shape)) * depth**-0.5 / 128
    shape = (experts, parts, depth // columns, width)
    size = 128 if stored.code == "e4m3" else 3  # about, of numbers
    signed = noise(seed, 10 + index, shape) * depth**-0.5 / size
    if stored.scale_code == "e5m3":  # of which some are subnormal, and a few 0
        return (signed / TENSOR_SCALE).astype(jnp.float8_e4m3fn)
    floats = jnp.abs(signed)
    if stored.scale_dtype != "uint8":
        return floats.astype(stored.scale_dtype)
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
