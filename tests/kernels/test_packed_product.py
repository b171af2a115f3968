"""Products with 4-bit weights: the reference, and the kernel interpreted, lowered, run."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.linear import Linear
from jaxspec.models.quantized.float8 import rounded_to_float8
from jaxspec.models.quantized.grouped import rounded_to_groups
from pallas_kernels.packed_product import MOST_ROWS, misfit, packed_product
from pallas_kernels.packed_product.cases import (
    BENCHMARK_CASES,
    SHAPES,
    TEST_CASES,
    Case,
    make_arguments,
)
from pallas_kernels.packed_product.mosaic_gpu import COPYING_REGISTERS, packed_product_mosaic
from pallas_kernels.packed_product.order import SPAN, input_order, kernel_order
from pallas_kernels.packed_product.tuning import (
    SUMMED_ROWS,
    PackedTuning,
    choose_packed_splits,
    packed_tuning,
    scales_weights,
)
from pallas_kernels.packed_product.widening import (
    BIAS,
    FLOAT8_STEP,
    HALVES,
    WORD,
    biased_pairs,
    float8_fours,
    word_offset,
)
from pallas_kernels.selection import Kernels
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast, first_of_each, slow

FLOAT32 = jnp.dtype("float32")
# Of the largest sum of absolute products: products of 16-bit floats and integers are exact, their
# sums are float32, and scales multiply the sums of a group.
ERROR = 1e-5
FLOAT8_ERROR = 2.0**-10  # Hopper's tensor cores keep fewer bits of sums of 8-bit floats
# The first one uses each part of its ring again, even in the smallest cases.
INTERPRETED = (PackedTuning(block=128, most_stages=2), PackedTuning(block=128, unit=128, ctas=1))
# What is lowered and run besides: larger units, more warpgroups for each producer, shorter lines
# of weights.
VARIANTS = (
    PackedTuning(unit=128, ctas=1),
    PackedTuning(unit=32, ctas=1, ahead=True),
    PackedTuning(warpgroups=4, block=128, unit=32, ctas=1),
    PackedTuning(warpgroups=4, unit=128, ctas=1),
    PackedTuning(block=128),
    PackedTuning(block=128, row_tile=16),
)


@functools.lru_cache(maxsize=len(TEST_CASES))
def arguments_of(case: Case) -> Any:
    """make_arguments in one program, instead of one for each of its operations."""
    return jax.jit(lambda: make_arguments(case))()


@functools.lru_cache(maxsize=len(TEST_CASES))
def exact(case: Case, *, of_kernel: bool) -> tuple[np.ndarray, np.ndarray]:
    """[S, M, V] in float64: the product, and the sums of the absolute values of its terms."""
    x, values, scale, zero, x_scale = arguments_of(case)
    groups = np.arange(case.depth) // case.group
    steps = np.asarray(values if case.float8 else input_order(values, case.x_bits), np.float64)
    if zero is not None:
        steps = steps - np.asarray(zero, np.float64).T[:, groups]
    weights = steps * np.asarray(scale, np.float64).T[:, groups]
    if of_kernel and scales_weights(case.rows, case.x_bits):
        weights = weights.astype(jnp.bfloat16).astype(np.float64)
    rows = np.asarray(x, np.float64)
    if x_scale is not None:
        of_input = groups if len(x_scale) > 1 else np.zeros_like(groups)
        rows = rows * np.asarray(x_scale, np.float64).T[: case.rows, of_input]
    rows = rows.reshape(case.rows, case.num_splits, -1).swapaxes(0, 1)
    weights = weights.reshape(case.width, case.num_splits, -1).transpose(1, 2, 0)
    return rows @ weights, np.abs(rows) @ np.abs(weights)


def assert_exact(
    found: Any, case: Case, *, of_kernel: bool = True, on_device: bool = False
) -> None:
    wanted, terms = exact(case, of_kernel=of_kernel)
    assert found.shape == wanted.shape
    share = FLOAT8_ERROR if case.x_bits == 8 and on_device else ERROR
    assert (np.abs(np.asarray(found, np.float64) - wanted) <= share * terms).all()


def kind_of(case: Case) -> tuple[bool, ...]:
    """The reference computes cases of a kind alike."""
    return case.float8, case.rounds, case.zeros, case.num_splits > 1


@pytest.mark.parametrize("case", first_of_each(TEST_CASES, kind_of), ids=str)
def test_the_reference_is_the_product(case: Case):
    function = jax.jit(functools.partial(packed_product, num_splits=case.num_splits))
    assert_exact(function(*arguments_of(case)), case, of_kernel=False)


@first_is_fast(TEST_CASES)
def test_interpreted_it_is_the_reference(case: Case):
    fits = case.rows <= SUMMED_ROWS  # of more rows two of those blocks have no room
    for config in (None, *INTERPRETED[: 2 * fits]):
        assert_exact(run_interpreted(case, config), case)


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (24, PackedTuning(warpgroups=4, unit=128, ctas=1)),
        pytest.param(48, PackedTuning(warpgroups=4, ctas=1), marks=pytest.mark.slow),
        pytest.param(24, PackedTuning(warpgroups=1, ctas=3, ahead=True), marks=pytest.mark.slow),
        pytest.param(7, PackedTuning(warpgroups=1, unit=128, ctas=6), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_interpreted_tiles_of_large_and_small_products_give_it(rows: int, config: PackedTuning):
    case = Case(rows, 512, 256, zeros=True)
    assert_exact(run_interpreted(case, config), case)


def run_interpreted(case: Case, config: PackedTuning | None) -> jax.Array:
    options: Any = {"num_splits": case.num_splits, "dtype": FLOAT32, "config": config}
    kernel = functools.partial(packed_product_mosaic, **options)
    return interpreted(kernel, *arguments_of(case), detect_races=True)


@pytest.mark.parametrize(
    "case",
    [
        *first_of_each(TEST_CASES, kind_of),
        *BENCHMARK_CASES[::15],
        *map(slow, BENCHMARK_CASES[5::15]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])  # of the result alone
def test_it_lowers_for_cuda(case: Case, dtype: str):
    arguments = jax.eval_shape(lambda: make_arguments(case))
    options = {"num_splits": case.num_splits, "dtype": dtype, "implementation": "mosaic_gpu"}
    lowered(functools.partial(packed_product, **options), *arguments)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_variants_lower_for_cuda(config: PackedTuning):
    arguments = jax.eval_shape(lambda: make_arguments(Case(64, 1024, 256, zeros=True)))
    options = {"num_splits": 1, "dtype": FLOAT32, "config": config}
    lowered(functools.partial(packed_product_mosaic, **options), *arguments)


def variants_to_run() -> Iterator[tuple[PackedTuning | None, Case]]:
    """Each case with its own variant, and small ones with the others that can take them."""
    for case in (*TEST_CASES, *BENCHMARK_CASES[::3]):
        yield None, case
    for config, case in itertools.product(VARIANTS, (*TEST_CASES, *BENCHMARK_CASES[::20])):
        if case.rows <= SUMMED_ROWS and case.width % config.tile == 0:
            yield config, case


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "case"), list(variants_to_run()), ids=str)
def test_on_the_device_it_is_the_product(config: PackedTuning | None, case: Case):
    options = {"num_splits": case.num_splits, "dtype": FLOAT32, "config": config}
    function = jax.jit(functools.partial(packed_product_mosaic, **options))
    arguments = arguments_of(case)
    first = function(*arguments)
    assert_exact(first, case, on_device=True)
    for _ in range(20):
        assert jnp.array_equal(first, function(*arguments)), "a race"


@pytest.mark.gpu
def test_on_the_device_a_row_is_the_same_whatever_stands_beside_it():
    x, *weights, _ = make_arguments(Case(64, 1024, 256, zeros=True))
    function = jax.jit(functools.partial(packed_product, implementation="mosaic_gpu"))
    whole = function(x, *weights)
    for rows in (1, 2, 7, 8, 9, 24, 33):
        assert jnp.array_equal(function(x[:rows], *weights), whole[:, :rows])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(1025, 256, 128), "1025 rows: at most 1024"),
        (Case(65, 256, 128, float8=True), "65 rows: at most 64"),
        (Case(2, 256, 96), "96 outputs: a multiple of 64"),
        (Case(200, 256, 64), "64 outputs: a multiple of 128"),
        (Case(2, 256, 128, group=16), "groups of 16 inputs: 32, 64, multiples of 128"),
        (Case(2, 256, 128, num_splits=4), "256 inputs in 4 parts: multiples of 128"),
    ],
    ids=["rows", "rows of floats", "outputs", "few outputs", "group", "parts"],
)
def test_unsupported_arguments_are_named(case: Case, message: str):
    shapes = jax.eval_shape(lambda: make_arguments(case))
    asked: Any = {"num_splits": case.num_splits, "implementation": "mosaic_gpu"}
    with pytest.raises(ValueError, match=f"the kernel cannot take {message}"):
        jax.eval_shape(functools.partial(packed_product, **asked), *shapes)


def test_wide_rows_are_named():
    x, values, scale, *_ = arguments_of(TEST_CASES[0])
    assert "must be bfloat16" in str(misfit(x.astype(FLOAT32), values, scale))


def test_splits_are_whole_steps_and_most_multiprocessors_have_work():
    for case in BENCHMARK_CASES:
        sizes = (case.rows, case.depth, case.width, case.weight_bits, case.x_bits)
        splits, config = choose_packed_splits(*sizes), packed_tuning(*sizes)
        assert case.depth % (splits * 128) == 0
        tiles = case.width // config.tile * config.row_parts(case.rows)
        assert 96 <= splits * tiles <= max(config.ctas * 132, tiles)


def test_warpgroups_take_no_more_registers_than_a_cta_has():
    """A warpgroup that asks for more waits forever."""
    configs = (
        packed_tuning(case.rows, case.depth, case.width, case.weight_bits, case.x_bits)
        for case in BENCHMARK_CASES
    )
    asking = [config for config in configs if config.registers is not None]
    assert asking
    for config in asking:
        assert config.registers is not None
        warpgroups = config.warpgroups + 1
        share = 65536 // (128 * warpgroups) // 8 * 8  # of a thread, when the kernel starts
        taken = config.warpgroups * config.registers + COPYING_REGISTERS
        assert config.registers > share and taken <= warpgroups * share


@pytest.mark.parametrize(("depth", "width"), [*SHAPES.values(), (4096, 896), (1024, 64)])
@pytest.mark.parametrize("x_bits", [8, 16])
def test_equally_padded_rows_have_the_same_kernel(depth: int, width: int, x_bits: int):
    for first in range(1, MOST_ROWS, 8):
        kernels = {
            (packed_tuning(*sizes), choose_packed_splits(*sizes))
            for rows in range(first, first + 8)
            for sizes in [(rows, depth, width, 4, x_bits)]
        }
        assert len(kernels) == 1


def stored_words(values: np.ndarray, bits: int) -> np.ndarray:
    """A warpgroup's weights [OUTPUTS, block] in shared memory, as words, for rows of ``bits``."""
    line = values.shape[1] // 2
    stored = np.asarray(kernel_order(jnp.asarray(values), bits))
    packed = ((stored[:, 1::2] & 15) << 4 | stored[:, ::2] & 15).astype(np.uint8)
    memory = np.zeros(packed.size, np.uint8)
    for address, byte in enumerate(packed.reshape(-1)):  # the copy engine swizzles addresses
        memory[address ^ (address >> 7 & line // 16 - 1) << 4] = byte
    return memory.view("<u4")


@pytest.mark.parametrize("block", [128, 256])
def test_a_thread_widens_the_weights_that_its_tensor_core_multiplies(block: int):
    """The arithmetic of the kernel's threads, on numbers, for one warpgroup.

    Of each 16 inputs a thread holds four registers of two weights: row 16 w + l / 4 of warp w and
    lane l, inputs 2 (l mod 4) and the next; the same 8 rows further; both again 8 inputs further
    (PTX ISA, wgmma, the fragment of matrix A).
    """
    values, threads = np.random.default_rng(0).integers(-8, 8, (64, block)), np.arange(128)
    words = stored_words(values, 16)
    for span, half in itertools.product(range(block // SPAN), range(2)):
        word = words[word_offset(threads, span, half, block // 2) // WORD]
        for j, pair in enumerate(biased_pairs(word, HALVES)):
            found = np.stack([pair & 0xFFFF, pair >> 16], 1).astype(np.uint16).view(jnp.bfloat16)
            rows = threads // 32 * 16 + threads % 32 // 4 + 8 * half
            inputs = SPAN * span + 8 * j + 2 * (threads % 4)
            expected = np.stack([values[rows, inputs], values[rows, inputs + 1]], 1)
            assert np.array_equal(found.astype(np.int64) - BIAS, expected)


@pytest.mark.parametrize("block", [128, 256])
def test_a_thread_widens_weights_to_8_bit_floats_for_its_tensor_core(block: int):
    """As above: of each 32 inputs a thread holds four registers of four weights: inputs
    4 (l mod 4) and the next three; the same 8 rows further; both again 16 inputs further."""
    values, threads = np.random.default_rng(0).integers(-8, 8, (64, block)), np.arange(128)
    words = stored_words(values, 8)
    for span, half in itertools.product(range(block // SPAN), range(2)):
        word = words[word_offset(threads, span, half, block // 2) // WORD]
        for h, four in enumerate(float8_fours(word)):
            found = four.astype("<u4").view(np.uint8).view(jnp.float8_e4m3fn).reshape(-1, 4)
            rows = threads // 32 * 16 + threads % 32 // 4 + 8 * half
            inputs = SPAN * span + 16 * h + 4 * (threads % 4)
            expected = values[rows[:, None], inputs[:, None] + np.arange(4)]
            assert np.array_equal(found.astype(np.float64) / FLOAT8_STEP, expected)


def kernels_in(own: Any, x: jax.ShapeDtypeStruct, *names: str) -> int:
    """How many partial sums of a linear, its shapes are enough, take of those that are chosen."""
    kernels = Kernels(frozenset(names or {"packed_product"}))
    splits = splits_of(own, x, kernels)
    call = jax.jit(lambda own, x: own.partial_sums(x, splits, kernels))
    program = call.trace(own, x).lower(lowering_platforms=("cuda",))
    assert program.out_info.shape == (splits, *x.shape[:-1], 2, 64)
    return program.as_text().count("custom_call @mosaic_gpu")


def splits_of(own: Any, x: jax.ShapeDtypeStruct, kernels: Kernels) -> int:
    """How many partial sums a linear has for rows of these shapes."""
    found: list[int] = []
    jax.eval_shape(lambda own, x: found.append(own.best_num_splits(x, kernels)), own, x)
    return found[0]


def linear_of(depth: int) -> Linear:
    """Its products are sums of partial ones."""
    weight: Any = jax.ShapeDtypeStruct((depth, 2, 64), jnp.bfloat16)
    return Linear(weight=weight, axes=("hidden", "two", "ff"))


def rows_of(number: int, depth: int = 2048, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, number, depth), dtype)


def in_groups(linear: Linear, **options: Any) -> Any:
    """Its shapes, rounded."""
    return jax.eval_shape(functools.partial(rounded_to_groups, **options), linear)


def test_products_of_8_bit_floats_take_the_kernels_where_they_fit():
    names = "packed_product", "round_tokens"
    for groups, count in ((1, 2), (2, 1)):
        rounding = functools.partial(rounded_to_float8, num_groups=groups)
        own = jax.eval_shape(rounding, linear_of(256))
        found = [kernels_in(own, rows_of(rows, 256), *names) for rows in (3, 65)]
        assert found == [count, count - 1]


def test_a_linear_that_rounds_its_inputs_takes_the_kernel_where_it_fits():
    linear = linear_of(2048)
    own = in_groups(linear, rounds=True)
    assert [kernels_in(own, rows_of(rows)) for rows in (3, 64, 1024, 1025)] == [1, 1, 1, 0]
    small_groups = in_groups(linear, group=64, rounds=True)
    with_zeros = in_groups(linear, symmetric=False, rounds=True)
    for other in (small_groups, with_zeros):
        assert kernels_in(other, rows_of(3)) == 0


def test_a_linear_takes_the_kernel_where_it_fits():
    """Its product is the kernel's, split-K partial sums included; elsewhere weights are widened."""
    own, kernels = in_groups(linear_of(2048)), Kernels(frozenset({"packed_product"}))
    assert splits_of(own, rows_of(3), kernels) == 2 and kernels_in(own, rows_of(3)) > 0
    assert splits_of(own, rows_of(3), Kernels()) == 1
    assert kernels_in(own, rows_of(1025)) == kernels_in(own, rows_of(3, dtype=jnp.float32)) == 0
    order = jax.ShapeDtypeStruct((2048,), jnp.int32)
    assert kernels_in(dataclasses.replace(own, groups=order, reordered=False), rows_of(3)) == 0
