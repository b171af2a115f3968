"""Residual addition and norm: the reference, and the Hopper kernel interpreted, lowered, run.

In three forms: the norm, the norm followed by other rows, the norm rounded to 8-bit floats.
"""

import functools
from collections.abc import Callable
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

FORMS = ("plain", "beside", "rounded")
each_form = pytest.mark.parametrize("form", FORMS)


def rows_beside(case: Case) -> jax.Array:
    """Three rows that follow the case's own."""
    return make_arguments(Case(3, case.hidden), jnp.bfloat16, seed=1)[0][None]


def function_of(form: str, case: Case, implementation: Any) -> Callable[..., Any]:
    how: dict[str, Any] = {"eps": EPS, "implementation": implementation}
    if form == "rounded":
        return functools.partial(add_rms_norm_rounded, **how)
    beside = rows_beside(case) if form == "beside" else None
    return functools.partial(add_rms_norm, **how, beside=beside)


def assert_same(found: Any, case: Case) -> None:
    """As the reference, but for the last bit of a bfloat16."""
    expected = add_rms_norm_reference(*make_arguments(case, jnp.bfloat16), EPS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=2**-7, atol=1e-6
        )


def assert_right(found: Any, form: str, case: Case) -> None:
    if form == "plain":
        assert_same(found, case)
    elif form == "beside":
        total, joined = found
        assert_same((total, joined[0, : case.rows]), case)
        assert jnp.array_equal(joined[:, case.rows :], rows_beside(case))
    else:
        assert_rounded(found, case)


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


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_the_sum_and_its_norm(case: Case):
    x, partials, weight = (np.asarray(a, np.float64) for a in make_arguments(case))
    total, normed = add_rms_norm(*make_arguments(case), eps=EPS)
    wanted = x + partials.sum(0)[: len(x)]
    expected = wanted / np.sqrt((wanted**2).mean(-1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(total, wanted, atol=1e-5)
    np.testing.assert_allclose(normed, expected, atol=2e-5)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_rounding_the_norm_is_the_two_operations(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    total, rounded, scale = add_rms_norm_rounded(*arguments, EPS)
    wanted, normed = add_rms_norm(*arguments, EPS)
    values, scales = round_tokens(normed.reshape(case.rows, -1))
    for one, other in ((total, wanted), (rounded, values), (scale, scales)):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


@first_is_fast(TEST_CASES)
def test_rows_beside_follow_the_norm(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    assert_right(function_of("beside", case, "reference")(*arguments), "beside", case)


@each_form
@first_is_fast(TEST_CASES)
def test_interpreted_it_is_the_reference(case: Case, form: str):
    arguments = make_arguments(case, jnp.bfloat16)
    more: Any = {"plain": {}, "beside": {"beside": rows_beside(case)}, "rounded": {"padded": 32}}
    how = {**more[form], "detect_races": True}
    assert_right(interpreted(add_rms_norm_mosaic, *arguments, EPS, **how), form, case)


@each_form
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_it_lowers_for_cuda(case: Case, form: str):
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    lowered(function_of(form, case, "mosaic_gpu"), *arguments)


@pytest.mark.gpu
@each_form
@pytest.mark.parametrize("case", [*TEST_CASES, Case(300, 4096)], ids=str)
def test_on_the_device_it_is_the_reference(case: Case, form: str):
    function = jax.jit(function_of(form, case, "mosaic_gpu"))
    arguments = make_arguments(case, jnp.bfloat16)
    first = function(*arguments)
    assert_right(first, form, case)
    for _ in range(20):
        for one, other in zip(first, function(*arguments), strict=True):
            if one.shape[0] == 1 and form == "rounded":  # scales: what pads them is not written
                one, other = one[:, : case.rows], other[:, : case.rows]
            assert jnp.array_equal(one.view(jnp.uint8), other.view(jnp.uint8)), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(300, 4096)], ids=str)
def test_on_the_device_the_rounded_norm_is_the_norm_rounded(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    (total, rounded, scale), (wanted, normed) = (
        jax.jit(function_of(form, case, "mosaic_gpu"))(*arguments) for form in ("rounded", "plain")
    )
    values, scales = round_tokens(normed.reshape(case.rows, -1))
    assert jnp.array_equal(total, wanted)
    assert jnp.array_equal(rounded.view(jnp.uint8), values.view(jnp.uint8))
    assert jnp.array_equal(scale[:, : case.rows], scales[:, : case.rows])


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
