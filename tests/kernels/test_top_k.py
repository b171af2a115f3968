"""The few largest: by counting, and by the kernel interpreted, lowered, run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels.top_k import top_k
from pallas_kernels.top_k.cases import BENCHMARK_CASES, TEST_CASES, Case, make_arguments
from pallas_kernels.top_k.mosaic_gpu import top_k_mosaic
from pallas_kernels.top_k.reference import best_with, best_with_by_counting, by_counting
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE

run_by_counting = jax.jit(by_counting, static_argnames="k", compiler_options=FAST_COMPILE)
run_best_with = jax.jit(best_with, static_argnums=1, compiler_options=FAST_COMPILE)
run_counted_with = jax.jit(
    best_with_by_counting, static_argnames="k", compiler_options=FAST_COMPILE
)
run_sort = jax.jit(lax.top_k, static_argnums=1, compiler_options=FAST_COMPILE)
run_log_sum_exp = jax.jit(jax.nn.logsumexp, static_argnums=1, compiler_options=FAST_COMPILE)
run = jax.jit(top_k, static_argnums=1, compiler_options=FAST_COMPILE)


@pytest.mark.parametrize("size", [1, slow(10), 700, slow(1025), slow(4000), 70_000])
@pytest.mark.parametrize("k", [slow(1), 10, slow(60)])
def test_counting_takes_what_a_sort_takes(size: int, k: int):
    k = min(k, size)
    x = np.random.default_rng(size).standard_normal((2, 3, size)).astype(np.float32)
    for found, wanted in zip(run_by_counting(x, k=k), run_sort(x, k), strict=True):
        np.testing.assert_array_equal(found, wanted)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([37, 1500]), st.sampled_from([1, 7]))
def test_the_first_of_equals_comes_first(seed: int, size: int, k: int):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 4, (2, size)).astype(np.float32)
    x[1] = -np.inf  # a row where everything is hidden still gives k distinct indices
    x[1, rng.integers(size)] = 1.0
    for found, wanted in zip(run_by_counting(x, k=k), run_sort(x, k), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("size", [37, slow(1500)])
def test_what_is_beside_the_largest_goes_along(size: int):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, (2, size)).astype(np.float32)
    beside = rng.integers(0, 90, (2, size)).astype(np.int32)
    values, indices = run_sort(x, 9)
    wanted = np.take_along_axis(beside, np.asarray(indices), axis=1)
    for found in (run_best_with(x, 9, [beside]), run_counted_with(x, beside, k=9)):
        np.testing.assert_array_equal(found[0], values)
        np.testing.assert_array_equal(found[1], wanted)


def test_indices_stay_in_range_beside_nan():
    x = np.full((1, 2000), np.nan, np.float32)
    _, indices = jax.device_get(run_by_counting(x, k=5))
    assert ((indices >= 0) & (indices < 2000)).all()


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST_COMPILE)
def hard_rows(case: Case) -> jax.Array:
    """Random ones, and rows of ties, of all but three hidden, and of all hidden."""
    (x,) = make_arguments(case)
    hidden = jnp.where(jnp.arange(case.size) % (case.size // 3) == 5, x[-1], -jnp.inf)
    return jnp.concatenate(
        [x, jnp.stack([jnp.round(x[-1]), hidden, jnp.full_like(hidden, -jnp.inf)])]
    )


def assert_is_top_k(found: Any, x: jax.Array, k: int) -> None:
    values, indices, log_sum = found
    wanted = run_sort(x, k)
    np.testing.assert_array_equal(values, wanted[0])
    np.testing.assert_array_equal(indices, wanted[1])
    np.testing.assert_allclose(log_sum, run_log_sum_exp(x, -1), rtol=1e-5)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_the_reference_takes_the_largest_and_sums_all(case: Case):
    x = hard_rows(case)
    assert_is_top_k(run(x, case.k), x, case.k)


@pytest.mark.parametrize("case", TEST_CASES[:2], ids=str)
def test_interpreted_the_kernel_does_the_same(case: Case):
    """Without clusters, which the interpreter does not know."""
    x = hard_rows(case)
    assert_is_top_k(interpreted(top_k_mosaic, x, k=case.k, shares=1), x, case.k)


def test_interpreted_indices_stay_in_range_beside_nan():
    x = np.zeros((2, 512), np.float32)
    x[0] = x[1, 7] = np.nan
    _, indices, _ = jax.device_get(interpreted(top_k_mosaic, jnp.asarray(x), k=5, shares=1))
    assert ((indices >= 0) & (indices < 512)).all()


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_it_lowers_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: make_arguments(case))
    lowered(functools.partial(top_k_mosaic, k=case.k), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, *BENCHMARK_CASES], ids=str)
def test_on_the_device_it_does_the_same(case: Case):
    x = hard_rows(case)
    for _ in range(5):
        assert_is_top_k(top_k(x, case.k, "mosaic_gpu"), x, case.k)


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (np.zeros((1, 256), jnp.bfloat16), 2, "bfloat16 entries"),
        (np.zeros((1, 1000), np.float32), 2, "rows of 1000"),
        (np.zeros((1, 128_256), np.float32), 2, "rows of 128256"),
        (np.zeros((1, 32_000), np.float32), 17, "k = 17"),
    ],
)
def test_unsupported_arguments_are_named(x: jax.Array, k: int, message: str):
    with pytest.raises(ValueError, match=f"the kernel cannot take {message}"):
        top_k(x, k, "mosaic_gpu")
