"""packed_float_product against products in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.packed_expert_product.tuning import PackedExpertTuning
from pallas_kernels.packed_float_product import MOST_ROWS, misfit, packed_float_product
from pallas_kernels.packed_float_product.cases import (
    BENCHMARK_CASES,
    TEST_CASES,
    Case,
    make_arguments,
)
from pallas_kernels.packed_float_product.mosaic_gpu import packed_float_product_mosaic
from pallas_kernels.packed_float_product.tuning import lanes_for, packed_float_tuning
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import slow

VARIANTS = (
    None,
    PackedExpertTuning(most_stages=2),  # each part of its ring is used again
    PackedExpertTuning(shares=2),
    PackedExpertTuning(line=64),
)
FLOAT32 = jnp.dtype("float32")


def assert_product(found: Any, arguments: Any) -> None:
    """Sums of products of bfloat16 with exact weights, in float32."""
    x, weights = arguments
    wide = np.asarray(weights.of(jnp.zeros((), jnp.int32))[0], np.float64)
    rows = np.asarray(x).astype(np.float64)
    bound = 1e-5 * np.abs(rows) @ np.abs(wide.T)
    assert (np.abs(np.asarray(found, np.float64) - rows @ wide.T) <= bound).all()


@pytest.mark.parametrize("config", [None, *map(slow, VARIANTS[1:])], ids=str)
@pytest.mark.parametrize("case", [TEST_CASES[0], *map(slow, TEST_CASES[1:])], ids=str)
def test_interpreted_it_is_the_product(case: Case, config: PackedExpertTuning | None):
    arguments = make_arguments(case)
    how: Any = {"dtype": FLOAT32, "config": config, "detect_races": True}
    assert_product(interpreted(packed_float_product_mosaic, *arguments, **how), arguments)


def test_the_reference_is_the_product_with_rounded_weights():
    x, weights = make_arguments(Case(5, 128, 64))
    wide = weights.of(jnp.zeros((), jnp.int32))[0].astype(jnp.bfloat16)
    found = packed_float_product(x, weights)
    wanted = np.asarray(x).astype(np.float64) @ np.asarray(wide).astype(np.float64).T
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "case", [Case(6, 128, 64, "mxfp4"), *map(slow, (*TEST_CASES, *BENCHMARK_CASES))], ids=str
)
def test_it_lowers_for_cuda(case: Case):
    function = functools.partial(packed_float_product, implementation="mosaic_gpu")
    lowered(function, *jax.eval_shape(lambda: make_arguments(case)))


def test_its_gradient_is_that_of_the_reference():
    x, weights = make_arguments(Case(3, 128, 64))

    def of_squares(implementation: Any) -> Any:
        product = functools.partial(packed_float_product, implementation=implementation)
        return jax.grad(lambda x: jnp.sum(product(x, weights) ** 2))(x)

    np.testing.assert_array_equal(of_squares("mosaic_gpu"), of_squares("reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("config", VARIANTS, ids=str)
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_on_the_device_it_is_the_product(case: Case, config: PackedExpertTuning | None):
    arguments = make_arguments(case)
    function = jax.jit(functools.partial(packed_float_product_mosaic, dtype=FLOAT32, config=config))
    first = function(*arguments)
    assert_product(first, arguments)
    for _ in range(20):
        assert jnp.array_equal(first, function(*arguments)), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("case", BENCHMARK_CASES, ids=str)
def test_on_the_device_products_of_layers_are_the_reference(case: Case):
    arguments = make_arguments(case)
    found, wanted = (
        jax.jit(functools.partial(packed_float_product, implementation=how))(*arguments)
        for how in ("mosaic_gpu", "reference")
    )
    assert np.linalg.norm(found - wanted) <= 5e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rows": MOST_ROWS + 1}, f"{MOST_ROWS + 1} rows: at most {MOST_ROWS}"),
        ({"form": "int4"}, "in int4: a single expert of one part in e2m1"),
        ({"width": 96}, "128 inputs and 96 outputs: multiples of 64"),
    ],
    ids=["rows", "code", "outputs"],
)
def test_what_does_not_fit_is_named(change: Any, problem: str):
    x, weights = make_arguments(Case(**{"rows": 2, "depth": 128, "width": 64} | change))
    assert misfit(x, weights) is not None
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{problem}"):
        packed_float_product(x, weights, implementation="mosaic_gpu")
    assert packed_float_product(x, weights, implementation="auto").shape == (len(x), weights.width)


@pytest.mark.parametrize("rows", [1, 9, 17, 64, 200])
@pytest.mark.parametrize("width", [64, 4096, 6144, 28672, 128256])
def test_tiles_keep_multiprocessors_busy_where_outputs_suffice(rows: int, width: int):
    lanes = lanes_for(rows)
    slots = -(-rows // lanes)
    config = packed_float_tuning(slots, lanes, width)
    assert width % config.tile == 0
    assert slots * width // config.tile >= min(MULTIPROCESSORS, slots * width // 64)
