"""Residual addition and norm: the reference, and the Hopper kernel interpreted, lowered, run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm, add_rms_norm_rounded
from pallas_kernels.add_rms_norm.cases import EPS, TEST_CASES, Case, make_arguments
from pallas_kernels.add_rms_norm.mosaic_gpu import add_rms_norm_mosaic
from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.round_tokens import round_tokens
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast


def assert_same(found: Any, case: Case) -> None:
    """As the reference, but for the last bit of a bfloat16."""
    expected = add_rms_norm_reference(*make_arguments(case, jnp.bfloat16), EPS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=2**-7, atol=1e-6
        )


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_the_sum_and_its_norm(case: Case):
    x, partials, weight = (np.asarray(a, np.float64) for a in make_arguments(case))
    total, normed = add_rms_norm(*make_arguments(case), eps=EPS)
    wanted = x + partials.sum(0)[: len(x)]
    expected = wanted / np.sqrt((wanted**2).mean(-1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(total, wanted, atol=1e-5)
    np.testing.assert_allclose(normed, expected, atol=2e-5)


@first_is_fast(TEST_CASES)
def test_interpreted_it_is_the_reference(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    found = interpreted(add_rms_norm_mosaic, *arguments, EPS, detect_races=True)
    assert_same(found, case)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_it_lowers_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    function = functools.partial(add_rms_norm, eps=EPS, implementation="mosaic_gpu")
    lowered(function, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(300, 4096)], ids=str)
def test_on_the_device_it_is_the_reference(case: Case):
    function = jax.jit(functools.partial(add_rms_norm, eps=EPS, implementation="mosaic_gpu"))
    arguments = make_arguments(case, jnp.bfloat16)
    first = function(*arguments)
    assert_same(first, case)
    for _ in range(20):
        again = function(*arguments)
        assert all(map(jnp.array_equal, first, again)), "a race"


def with_rows_beside(case: Case) -> tuple[Any, jax.Array]:
    """The case's arguments, and three rows that follow its own."""
    rows = make_arguments(Case(3, case.hidden), jnp.bfloat16, seed=1)[0]
    return make_arguments(case, jnp.bfloat16), rows[None]


def assert_followed(found: Any, case: Case, beside: jax.Array) -> None:
    total, joined = found
    assert_same((total, joined[0, : case.rows]), case)
    assert jnp.array_equal(joined[:, case.rows :], beside)


@first_is_fast(TEST_CASES)
def test_rows_beside_follow_the_norm(case: Case):
    arguments, beside = with_rows_beside(case)
    of_norm = functools.partial(add_rms_norm, eps=EPS, beside=beside)
    assert_followed(of_norm(*arguments), case, beside)
    found = interpreted(add_rms_norm_mosaic, *arguments, EPS, beside=beside, detect_races=True)
    assert_followed(found, case, beside)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_with_rows_beside_it_lowers_for_cuda(case: Case):
    arguments, beside = jax.eval_shape(lambda: with_rows_beside(case))

    def function(arguments: Any, beside: jax.Array) -> Any:
        own = functools.partial(add_rms_norm, eps=EPS, implementation="mosaic_gpu", beside=beside)
        return own(*arguments)

    program = jax.jit(function).trace(arguments, beside).lower(lowering_platforms=("cuda",))
    assert program.out_info[1].shape == (1, case.rows + 3, case.hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_on_the_device_rows_beside_follow_the_norm(case: Case):
    arguments, beside = with_rows_beside(case)
    how = {"eps": EPS, "implementation": "mosaic_gpu", "beside": beside}
    assert_followed(jax.jit(functools.partial(add_rms_norm, **how))(*arguments), case, beside)


def assert_rounded(found: Any, case: Case) -> None:
    """What is rounded is the norm, which may differ in the last bit of a bfloat16."""
    total, rounded, scale = found
    wide = rounded.astype(jnp.float32) * scale[0, : case.rows, None]
    _, normed = add_rms_norm_reference(*make_arguments(case, jnp.bfloat16), EPS)
    normed = np.asarray(normed, np.float32)
    assert_same((total, normed), case)
    largest = np.abs(normed).max(-1, keepdims=True)
    np.testing.assert_allclose(scale[0, : case.rows, None], largest / 448, rtol=2**-7)
    step = np.maximum(np.abs(normed) * 2.0**-4, largest / 448 * 2.0**-10)  # half of e4m3's steps
    assert (np.abs(wide - normed) <= 1.2 * step).all()


@first_is_fast(TEST_CASES)
def test_interpreted_it_rounds_the_norm(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    found = interpreted(add_rms_norm_mosaic, *arguments, EPS, padded=32, detect_races=True)
    assert_rounded(found, case)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_rounding_the_norm_is_the_two_operations(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    total, rounded, scale = add_rms_norm_rounded(*arguments, EPS)
    wanted, normed = add_rms_norm(*arguments, EPS)
    values, scales = round_tokens(normed.reshape(case.rows, -1))
    for one, other in ((total, wanted), (rounded, values), (scale, scales)):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_rounding_the_norm_lowers_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    function = functools.partial(add_rms_norm_rounded, eps=EPS, implementation="mosaic_gpu")
    lowered(function, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(300, 4096)], ids=str)
def test_on_the_device_it_rounds_the_norm(case: Case):
    how = {"eps": EPS, "implementation": "mosaic_gpu"}
    function = jax.jit(functools.partial(add_rms_norm_rounded, **how))
    plain = jax.jit(functools.partial(add_rms_norm, **how))
    arguments = make_arguments(case, jnp.bfloat16)
    total, rounded, scale = first = function(*arguments)
    assert_rounded(first, case)
    wanted, normed = plain(*arguments)
    values, scales = round_tokens(normed.reshape(case.rows, -1))
    assert jnp.array_equal(total, wanted)
    assert jnp.array_equal(rounded.view(jnp.uint8), values.view(jnp.uint8))
    assert jnp.array_equal(scale[:, : case.rows], scales[:, : case.rows])
    for _ in range(20):
        again, _, steps = function(*arguments)
        assert jnp.array_equal(total, again), "a race"
        assert jnp.array_equal(scale[:, : case.rows], steps[:, : case.rows]), "a race"


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (Case(1, 100), jnp.bfloat16, "a multiple of 256"),
        (Case(1, 256), jnp.float32, "both must be bfloat16"),
    ],
    ids=["width", "dtype"],
)
def test_unsupported_arguments_are_named(case: Case, dtype: Any, message: str):
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        add_rms_norm(*make_arguments(case, dtype), eps=EPS, implementation="mosaic_gpu")
