"""Residual addition and norm: the reference, and the Hopper kernel interpreted, lowered, run.

In four forms: the norm, the norm followed by other rows, the norm rounded to 8-bit floats with a
scale for each row, and with one for each group of its entries.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm, add_rms_norm_grouped, add_rms_norm_rounded
from pallas_kernels.add_rms_norm.cases import EPS, TEST_CASES, Case, make_arguments
from pallas_kernels.add_rms_norm.mosaic_gpu import (
    add_rms_norm_grouped_mosaic,
    add_rms_norm_mosaic,
    add_rms_norm_rounded_mosaic,
)
from pallas_kernels.add_rms_norm.reference import add_rms_norm_reference
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.round_tokens import round_tokens
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast, slow

FORMS = ("plain", "beside", "rounded", "grouped")
GROUP = 128
jit_norm = jax.jit(add_rms_norm, static_argnames="eps")


def of_forms(cases: Sequence[Case], fast: Sequence[tuple[str, Case]] = ()) -> pytest.MarkDecorator:
    """Each form of each case that it takes, all but those listed slow; without a list all fast."""
    every = [
        (form, case) for case in cases for form in FORMS if form != "grouped" or fits_groups(case)
    ]
    marked = [one if not fast or one in fast else slow(*one) for one in every]
    return pytest.mark.parametrize(("form", "case"), marked, ids=str)


def fits_groups(case: Case) -> bool:
    return case.hidden % 512 == 0


SMALL, EXPERTS = TEST_CASES[0], next(case for case in TEST_CASES if case.choices)
GUARDS = [*((form, SMALL) for form in FORMS[:3]), ("plain", EXPERTS), ("grouped", EXPERTS)]


def rows_beside(case: Case) -> jax.Array:
    """Three rows that follow the case's own."""
    return make_arguments(Case(3, case.hidden), jnp.bfloat16, seed=1)[0][None]


def function_of(form: str, case: Case, implementation: Any) -> Callable[..., Any]:
    how: dict[str, Any] = {"eps": EPS, "implementation": implementation}
    if form in ("rounded", "grouped"):
        rounding = add_rms_norm_rounded if form == "rounded" else add_rms_norm_grouped
        return functools.partial(rounding, **how)
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
    elif form == "rounded":
        assert_rounded(found, case, case.hidden)
    else:
        total, normed, *rounded = found
        assert_same((total, normed), case)
        assert_rounded((total, *rounded), case, GROUP)


def assert_rounded(found: Any, case: Case, size: int) -> None:
    """What is rounded is the norm, which may differ in the last bit of a bfloat16; so many entries
    share a scale."""
    total, rounded, scale = found
    _, normed = add_rms_norm_reference(*make_arguments(case, jnp.bfloat16), EPS)
    normed = np.asarray(normed, np.float32)
    assert_same((total, normed), case)
    groups = normed.reshape(case.rows, -1, size)
    scale = np.asarray(scale)[:, : case.rows].T[..., None]
    wide = np.asarray(rounded.astype(jnp.float32)).reshape(groups.shape) * scale
    largest = np.abs(groups).max(-1, keepdims=True)
    np.testing.assert_allclose(scale, largest / 448, rtol=2**-7)
    step = np.maximum(np.abs(groups) * 2.0**-4, largest / 448 * 2.0**-10)  # half of e4m3's steps
    assert (np.abs(wide - groups) <= 1.2 * step).all()


def added(partials: Any) -> np.ndarray:
    """The sum of what is added to each row, in float64."""
    if not isinstance(partials, ChosenProducts):
        return np.asarray(partials, np.float64).sum(0)
    products, places, weights = (np.asarray(array, np.float64) for array in partials)
    total = np.zeros((len(places), products.shape[-1]))
    for row, choice in np.argwhere(places >= 0):
        total[row] += weights[row, choice] * products[int(places[row, choice])]
    return total


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_the_sum_and_its_norm(case: Case):
    x, partials, weight = make_arguments(case)
    total, normed = jit_norm(x, partials, weight, eps=EPS)
    wanted = np.asarray(x, np.float64) + added(partials)[: case.rows]
    scale = np.sqrt((wanted**2).mean(-1, keepdims=True) + EPS)
    np.testing.assert_allclose(total, wanted, atol=1e-5)
    np.testing.assert_allclose(normed, wanted / scale * np.asarray(weight), atol=2e-5)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_rounding_the_norm_is_the_two_operations(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    wanted, normed = add_rms_norm(*arguments, EPS)
    in_groups = add_rms_norm_grouped(*arguments, EPS)
    of_rows = add_rms_norm_rounded(*arguments, EPS)
    assert jnp.array_equal(in_groups[1], normed)
    for groups, found in ((1, of_rows), (case.hidden // GROUP, (in_groups[0], *in_groups[2:]))):
        values, scales = round_tokens(normed.reshape(case.rows, -1), groups)
        for one, other in zip(found, (wanted, values, scales), strict=True):
            assert one.shape == other.shape
            np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


def test_what_an_expert_of_no_choice_made_is_not_read():
    products = jnp.full((2, 256), jnp.nan).at[1].set(1.0)
    chosen = ChosenProducts(products, jnp.array([[1, -1]]), jnp.array([[2.0, jnp.nan]]))
    np.testing.assert_array_equal(chosen.total(), np.full((1, 256), 2.0))


@first_is_fast(TEST_CASES)
def test_rows_beside_follow_the_norm(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    assert_right(function_of("beside", case, "reference")(*arguments), "beside", case)


@of_forms(TEST_CASES, GUARDS)
def test_interpreted_it_is_the_reference(form: str, case: Case):
    arguments = (*make_arguments(case, jnp.bfloat16), EPS)
    kernel: Any = add_rms_norm_mosaic
    if form == "beside":
        kernel = functools.partial(kernel, beside=rows_beside(case))
    elif form != "plain":
        kernel = add_rms_norm_rounded_mosaic if form == "rounded" else add_rms_norm_grouped_mosaic
        kernel = functools.partial(kernel, padded=32)
    assert_right(interpreted(kernel, *arguments, detect_races=True), form, case)


@of_forms(TEST_CASES)
def test_it_lowers_for_cuda(form: str, case: Case):
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    lowered(function_of(form, case, "mosaic_gpu"), *arguments)


@pytest.mark.gpu
@of_forms([*TEST_CASES, Case(300, 4096)])
def test_on_the_device_it_is_the_reference(form: str, case: Case):
    function = jax.jit(function_of(form, case, "mosaic_gpu"))
    arguments = make_arguments(case, jnp.bfloat16)
    first = function(*arguments)
    assert_right(first, form, case)
    for _ in range(20):
        for place, (one, other) in enumerate(zip(first, function(*arguments), strict=True)):
            if form in ("rounded", "grouped") and place == len(first) - 1:
                one, other = one[:, : case.rows], other[:, : case.rows]  # padding is not written
            assert jnp.array_equal(one.view(jnp.uint8), other.view(jnp.uint8)), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(300, 4096)], ids=str)
def test_on_the_device_the_rounded_norm_is_the_norm_rounded(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    wanted, normed = jax.jit(function_of("plain", case, "mosaic_gpu"))(*arguments)
    for form, groups in (("rounded", 1), ("grouped", case.hidden // GROUP)):
        if form == "grouped" and not fits_groups(case):
            continue
        total, *_, rounded, scale = jax.jit(function_of(form, case, "mosaic_gpu"))(*arguments)
        values, scales = round_tokens(normed.reshape(case.rows, -1), groups)
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


def test_rows_that_groups_do_not_fit_are_named():
    arguments = make_arguments(Case(1, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="a multiple of 512 to round them in groups"):
        add_rms_norm_grouped(*arguments, eps=EPS, implementation="mosaic_gpu")
