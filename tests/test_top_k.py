"""The few largest by counting are those of lax.top_k."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxspec.top_k import by_counting


@pytest.mark.parametrize("size", [1, 10, 700, 1025, 4000, 70_000])
@pytest.mark.parametrize("k", [1, 10, 60])
def test_counting_takes_what_a_sort_takes(size: int, k: int):
    k = min(k, size)
    x = jax.random.normal(jax.random.key(size), (2, 3, size))
    for found, wanted in zip(by_counting(x, k=k), lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(found, wanted)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([37, 1500]), st.sampled_from([1, 7]))
def test_the_first_of_equals_comes_first(seed: int, size: int, k: int):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 4, (2, size)).astype(np.float32)
    x[1] = -np.inf  # a row where everything is hidden still gives k distinct indices
    x[1, rng.integers(size)] = 1.0
    for found, wanted in zip(by_counting(jnp.asarray(x), k=k), lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_indices_stay_in_range_beside_nan():
    x = jnp.full((1, 2000), jnp.nan)
    _, indices = by_counting(x, k=5)
    assert ((indices >= 0) & (indices < 2000)).all()
