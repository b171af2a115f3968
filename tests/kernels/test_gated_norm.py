"""Gated norms by heads: the Hopper kernels interpreted, lowered, run, beside NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_norm import gated_norm, gated_norm_rounded
from pallas_kernels.gated_norm.cases import EPS, TEST_CASES, Case, make_arguments
from pallas_kernels.gated_norm.mosaic_gpu import gated_norm_mosaic, gated_norm_rounded_mosaic
from pallas_kernels.round_tokens import round_tokens
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast

FUNCTIONS = gated_norm, gated_norm_rounded


def assert_normed(found: Any, arguments: Any) -> None:
    x, projected, norm = (np.asarray(argument, np.float64) for argument in arguments)
    rows, groups, heads, size = x.shape
    gates = projected[..., -heads * size :].reshape(x.shape)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * norm
    expected = (normed * gates / (1 + np.exp(-gates))).reshape(rows, -1)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-7, atol=1e-6)


def assert_rounded(found: Any, normed: Any) -> None:
    """As ``round_tokens`` of the norm, but for the padding of the scales."""
    for one, other in zip(found, round_tokens(normed, normed.shape[1] // 128), strict=True):
        one, other = (y[:, : len(normed)] if y.dtype == jnp.float32 else y for y in (one, other))
        np.testing.assert_array_equal(*(np.asarray(y).view(np.uint8) for y in (one, other)))


@first_is_fast(TEST_CASES)
def test_it_is_written_out_in_numpy(case: Case):
    arguments = make_arguments(case)
    normed = gated_norm(*arguments, EPS, "reference")
    assert_normed(normed, arguments)
    assert_rounded(gated_norm_rounded(*arguments, EPS, "reference"), normed)
    found = interpreted(gated_norm_mosaic, *arguments, EPS, detect_races=True)
    assert_normed(found, arguments)
    rounded = interpreted(gated_norm_rounded_mosaic, *arguments, EPS, 32, detect_races=True)
    assert_rounded(rounded, found)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_it_lowers_for_cuda(case: Case, function: Any):
    arguments = jax.eval_shape(functools.partial(make_arguments, case))
    lowered(functools.partial(function, eps=EPS, implementation="mosaic_gpu"), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(512, 16, 2)], ids=str)
def test_on_the_device_it_is_the_reference(case: Case):
    arguments = make_arguments(case)
    kernel, rounding = (
        jax.jit(functools.partial(function, eps=EPS, implementation="mosaic_gpu"))
        for function in FUNCTIONS
    )
    first = kernel(*arguments)
    assert_normed(first, arguments)
    assert_rounded(rounding(*arguments), first)
    for _ in range(20):
        assert jnp.array_equal(first, kernel(*arguments)), "a race"


def test_unsupported_arguments_are_named():
    x, projected, norm = make_arguments(Case(2, 1, 1))
    wide, many = projected.astype(jnp.float32), jnp.zeros((513, *x.shape[1:]))
    for given, message in (((x, wide), "with float32 gates"), ((many, projected), "513 rows")):
        with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
            gated_norm(*given, norm, EPS, "mosaic_gpu")
