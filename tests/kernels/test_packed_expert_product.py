"""packed_expert_product against products in float64; how its numbers are stored and widened."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_product.cases import chosen_experts
from pallas_kernels.expert_slots import MOST_ROWS
from pallas_kernels.four_bits import ScaleCode, widened_pairs, widened_scales
from pallas_kernels.packed_expert_product import misfit, packed_expert_product, widening
from pallas_kernels.packed_expert_product.cases import (
    BENCHMARK_CASES,
    TEST_CASES,
    Case,
    make_arguments,
)
from pallas_kernels.packed_expert_product.mosaic_gpu import packed_expert_product_mosaic
from pallas_kernels.packed_expert_product.scales import with_e5m3_scales
from pallas_kernels.packed_expert_product.tuning import PackedExpertTuning
from pallas_kernels.packed_experts import BIAS, FORMATS, Code, PackedExperts, numbers_of
from pallas_kernels.packed_order import file_order, stored_order
from tests.helpers.expert_products import assert_exact
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import slow
from tests.helpers.random_experts import random_bytes

CODES: tuple[Code, ...] = ("e4m3", "e2m1", "int4")
ON_THE_DEVICE = pytest.param("on the device", marks=pytest.mark.gpu)
VARIANTS = (
    PackedExpertTuning(most_stages=2),  # each part of its ring is used again
    PackedExpertTuning(shares=2),
    PackedExpertTuning(tiles=3),
)


@functools.lru_cache(maxsize=len(TEST_CASES))
def arguments_of(case: Case, seed: int = 0) -> Any:
    return make_arguments(case, seed)


def assert_widened_exact(found: Any, case: Case, arguments: Any) -> None:
    """Against the products of the widened weights in float64, with hidden units rounded."""
    x, experts, gate_up, down, bias = arguments
    every = jnp.arange(case.num_experts)
    wide = np.moveaxis(np.asarray(gate_up.of(every)), -1, 1), np.asarray(down.of(every))[:, 0]
    assert_exact(found, case, (x, experts, wide[0], np.swapaxes(wide[1], 1, 2), bias))


def run_interpreted(arguments: Any, case: Case, config: PackedExpertTuning | None = None) -> Any:
    how: Any = {"clamp": case.clamp, "config": config, "detect_races": True}
    return interpreted(packed_expert_product_mosaic, *arguments, **how)


@pytest.mark.parametrize("code", CODES)
def test_numbers_are_stored_without_loss(code: Code):
    values = jnp.asarray(random_bytes((2, 3, 64), code))
    stored = stored_order(values, code)
    np.testing.assert_array_equal(file_order(stored, code), values)
    if code == "e4m3":
        wanted = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        wanted = widened_pairs(values, code)
    np.testing.assert_array_equal(numbers_of(stored, code), wanted)


@pytest.mark.parametrize("code", CODES)
def test_a_thread_widens_the_numbers_that_tensor_cores_want(code: Code):
    """Thread t has inputs 2 t + e and 8 further on, of spans of 16 or 32."""
    stored = np.asarray(stored_order(jnp.asarray(random_bytes((64, 32), code)), code))
    words = stored.view(np.uint32)
    numbers = np.asarray(numbers_of(jnp.asarray(stored), code))
    pairs_of, span, power = {
        "e4m3": (widening.float8_pairs, 16, 2.0 ** widening.SHIFTS["e4m3"]),
        "e2m1": (widening.e2m1_pairs, 32, 2.0 ** widening.SHIFTS["e2m1"]),
        "int4": (widening.biased_pairs, 32, 1.0),
    }[code]
    bias = BIAS if code == "int4" else 0
    for row, place in np.ndindex(words.shape):
        pairs = np.array([pair % 2**32 for pair in pairs_of(int(words[row, place]))], np.uint32)
        floats = pairs.view(jnp.bfloat16).astype(np.float64).reshape(-1, 2)
        first = place // 4 * span + 2 * (place % 4)
        wanted = [numbers[row, first + 8 * j : first + 8 * j + 2] for j in range(len(pairs))]
        np.testing.assert_array_equal(floats * power - bias, wanted)


@pytest.mark.parametrize("code", ["e8m0", "e5m3"])
def test_scales_are_in_both_halves(code: ScaleCode):
    power = 2.0 ** (126 - widening.LEFT_SHIFT)
    for byte in (64, 120, 127, 190):
        mantissa = 1 + byte % 8 / 8
        scale = 2.0 ** (byte - 127) if code == "e8m0" else 2.0 ** (byte // 8 - 15) * mantissa
        assert widened_scales(jnp.uint8(byte), code) == scale
        pair = np.array([widening.scale_pair(byte, code, 126)], np.uint32).view(jnp.bfloat16)
        np.testing.assert_array_equal(pair.astype(np.float64), [scale * power] * 2)


def test_weights_of_mxfp8_are_exact_as_the_kernel_has_them():
    """Every number times every scale of 2^-61 to 2^63."""
    values = np.arange(256).astype(np.uint8)
    numbers = values[values & 127 != 127].view(jnp.float8_e4m3fn).astype(np.float64)
    bytes_of_scales = np.arange(127 - 61, 127 + 64).astype(np.uint32)
    factors = widening.scale_pair(bytes_of_scales, "e8m0", widening.SHIFTS["e4m3"])
    factors = factors.view(jnp.bfloat16).astype(np.float64)[::2]
    products = np.outer(factors, numbers * 2.0**-120)
    np.testing.assert_array_equal(products.astype(jnp.bfloat16).astype(np.float64), products)
    wanted = np.outer(2.0 ** (bytes_of_scales - 127.0), numbers)
    np.testing.assert_array_equal(products * widening.SUMS_OF_SCALED, wanted)


def test_weights_of_nvfp4_are_exact_as_the_kernel_has_them():
    """Every number times every scale: as jnp widens them, and as a thread does in bfloat16."""
    scales = np.arange(256, dtype=np.uint8)[np.arange(256) & 127 != 127]
    scales = scales.view(jnp.float8_e4m3fn)[:, None].repeat(16, 1)  # [254, 16]
    codes = np.arange(0, 256, 17).astype(np.uint8).repeat(8)  # each number twice in a byte
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([magnitudes, -magnitudes])
    wanted = (scales.astype(np.float64) * numbers)[..., None].repeat(16, 2)  # [254, 16, 16]
    pairs = np.broadcast_to(codes, (len(scales), len(codes)))
    stored, made = map(np.asarray, with_e5m3_scales(jnp.asarray(pairs), jnp.asarray(scales)))
    assert made.min() >= 8  # neither 0 nor subnormal
    found = np.asarray(widened_pairs(jnp.asarray(stored), "e2m1")).reshape(wanted.shape)
    widened = np.asarray(widened_scales(jnp.asarray(made), "e5m3"))
    np.testing.assert_array_equal(found * widened[..., None], wanted)
    factors = widening.scale_pair(made.astype(np.uint32), "e5m3", widening.SHIFTS["e2m1"])
    factors = factors.view(jnp.bfloat16)[:, ::2]
    products = found.astype(np.float64) * 2.0**-126 * factors.astype(np.float64)[..., None]
    np.testing.assert_array_equal(products.astype(jnp.bfloat16).astype(np.float64), products)
    np.testing.assert_array_equal(products * widening.SUMS_OF_SCALED, wanted)


@pytest.mark.parametrize(("line", "size"), [(32, 160), (64, 64), (128, 128)])
def test_words_are_where_the_copy_engine_puts_them(line: int, size: int):
    """A tile of 8 rows and a line's bytes, of which 16 are moved as one; tiles of the same rows
    follow each other."""
    offsets = set()
    for thread in range(128):
        for chunk in range(size // 16):
            for half in range(2):
                row = thread // 32 * 16 + thread % 32 // 4 + 8 * half
                tile, place = divmod(chunk, line // 16)
                start = (row // 8 * (size // line) + tile) * 8 * line + row % 8 * line
                moved = place ^ (row % 8 * line // 128)
                found = widening.word_offset(thread, chunk, half, line, size)
                assert found == start + 16 * moved + 4 * (thread % 4)
                offsets.add(found)
    assert len(offsets) == 64 * size // 4


@pytest.mark.parametrize("case", [TEST_CASES[0], *map(slow, TEST_CASES[1:])], ids=str)
def test_interpreted_it_is_the_reference(case: Case):
    arguments = arguments_of(case)
    function = jax.jit(functools.partial(packed_expert_product, clamp=case.clamp))
    x, *rest = arguments
    with jax.default_matmul_precision("highest"):
        found = function(x.astype(jnp.float32), *rest)
    assert np.isfinite(np.asarray(found)).all()
    x, experts, *_ = arguments
    here = np.asarray(experts) < case.num_experts
    kernel = run_interpreted(arguments, case)
    error = np.linalg.norm(np.asarray(found - kernel)[here])
    assert error <= 3e-3 * np.linalg.norm(np.asarray(found)[here])


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, *VARIANTS], ids=str)
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_interpreted_it_is_the_product(case: Case, config: PackedExpertTuning | None):
    arguments = arguments_of(case)
    assert_widened_exact(run_interpreted(arguments, case, config), case, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_interpreted_a_row_is_the_same_whatever_others_choose(form: str):
    """Another row of NaN included."""
    case = Case(5, 2, 4, 128, 64, form=form)
    x, experts, *rest = arguments_of(case)
    x, experts = x.at[1].set(jnp.nan), experts.at[0].set(jnp.array([2, 0]))
    first = run_interpreted((x, experts, *rest), case)[0]
    for seed in (1, 2):
        others, place = chosen_experts(case, seed), 2 + seed
        changed = experts.at[1:].set(others[1:]).at[place].set(experts[0])
        moved = x.at[place].set(x[0]).at[0].set(x[2])
        assert jnp.array_equal(run_interpreted((moved, changed, *rest), case)[place], first)


@pytest.mark.parametrize(
    "case", [TEST_CASES[4], *map(slow, (*TEST_CASES, *BENCHMARK_CASES))], ids=str
)
def test_it_lowers_for_cuda(case: Case):
    function = functools.partial(
        packed_expert_product, clamp=case.clamp, implementation="mosaic_gpu"
    )
    lowered(function, *jax.eval_shape(lambda: make_arguments(case)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_interpreted_rows_of_prompts_are_multiplied(form: str):
    """So many pairs are sorted; some are of experts that other devices have."""
    case = Case(1030, 4, 6, 128, 64, missing=2, form=form)
    arguments = make_arguments(case, 0)
    assert_widened_exact(run_interpreted(arguments, case), case, arguments)


# Of prompts: pairs are sorted.
MANY_ROWS = tuple(Case(MOST_ROWS, 2, 32, 128, 64, form=form) for form in ("fp8", "mxfp4", "int4"))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, *VARIANTS], ids=str)
@pytest.mark.parametrize("case", [*TEST_CASES, *MANY_ROWS], ids=str)
def test_on_the_device_it_is_the_product(case: Case, config: PackedExpertTuning | None):
    arguments = arguments_of(case)
    kernel = functools.partial(packed_expert_product_mosaic, clamp=case.clamp, config=config)
    function = jax.jit(kernel)
    first = function(*arguments)
    assert_widened_exact(first, case, arguments)
    here = (arguments[1] < case.num_experts)[..., None]
    for _ in range(20):
        assert not jnp.any(here & (first != function(*arguments))), "a race"


def with_scales_of_outputs(weights: PackedExperts, seed: int) -> PackedExperts:
    """e4m3 with a scale for each output, as loaders make them: factors of one block."""
    experts, parts, width, depth = weights.values.shape
    scales = np.random.default_rng(seed).uniform(0.5, 1.5, (experts, parts, width))
    return dataclasses.replace(
        weights,
        scale=jnp.ones((experts, parts, 1, 1), jnp.float32),
        factor=jnp.asarray(scales * depth**-0.5 / 128, jnp.float32),
        block=(width, depth),
    )


@pytest.mark.parametrize("where", [slow("interpreted"), ON_THE_DEVICE])
@pytest.mark.parametrize("rows", [3, 40])
def test_scales_of_outputs_are_factors(rows: int, where: str):
    case = Case(rows, 3, 6, 256, 128)
    x, experts, gate_up, down, _ = arguments_of(case)
    weights = with_scales_of_outputs(gate_up, 1), with_scales_of_outputs(down, 2)
    arguments = x, experts, *weights, None
    assert misfit(x, *weights) is None
    if where == "interpreted":
        found = run_interpreted(arguments, case)
    else:
        found = jax.jit(functools.partial(packed_expert_product_mosaic, clamp=None))(*arguments)
    assert_widened_exact(found, case, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 8, 32, 128])
@pytest.mark.parametrize("form", FORMATS)
def test_on_the_device_a_row_is_the_same_whatever_others_choose(form: str, rows: int):
    case = Case(rows, 8, 64, 2048, 512, form=form)
    x, experts, *rest = arguments_of(case)
    function = jax.jit(functools.partial(packed_expert_product, implementation="mosaic_gpu"))
    first = function(x, experts, *rest)[0]
    for seed in range(1, 8):
        place = seed % rows
        changed = jnp.asarray(chosen_experts(case, seed)).at[place].set(experts[0])
        moved = x.at[0].set(jnp.nan).at[place].set(x[0])
        assert jnp.array_equal(function(moved, changed, *rest)[place], first)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rows": 4097}, "4097 rows: at most 4096"),
        ({"hidden": 96}, "96 inputs and 64 outputs: multiples of 64"),
        ({"code": "e4m3", "block": (128, 64)}, "blocks of 128 outputs and 64 inputs"),
        ({"block": (1, 16)}, "groups of 16 of 128 inputs"),
        ({"code": "e4m3", "scale": "float32"}, "e4m3 with scales of float32: bytes"),
        ({"block": (1, 24), "scale_code": "e5m3"}, "groups of 24 of 128 inputs: all inputs, or"),
        ({"hidden": 192, "block": (1, 96)}, "groups of 96 of 192 inputs: all inputs, or a power"),
        ({"block": (1, 64)}, "bytes as scales of 64 inputs: of at most 32"),
        ({"scale": "float8_e4m3fn"}, "e2m1 with scales of float8_e4m3fn"),
        ({"x": "float32"}, "rows of float32"),
    ],
)
def test_what_the_kernel_cannot_take_is_said(change: dict[str, Any], problem: str):
    hidden, code = change.get("hidden", 128), change.get("code", "e2m1")
    shape: Any = jax.ShapeDtypeStruct

    def weights(parts: int, width: int, depth: int) -> PackedExperts:
        scale = shape((4, parts, 1, 1), change.get("scale", "uint8"))
        values = shape((4, parts, width, depth if code == "e4m3" else depth // 2), "uint8")
        block, scale_code = change.get("block", (1, 32)), change.get("scale_code", "e8m0")
        return PackedExperts(values, scale, None, code, block, scale_code)

    x = shape((change.get("rows", 3), hidden), change.get("x", "bfloat16"))
    found = misfit(x, weights(2, 64, hidden), weights(1, hidden, 64))
    assert found is not None and problem in found
