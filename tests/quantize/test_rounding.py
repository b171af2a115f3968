"""Rounding to nearest: scales, zeros and values."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.quantize.rounding import Grid, output_error, round_to_float8, round_to_nearest

GRIDS = st.builds(Grid, st.integers(2, 8), st.sampled_from([None, 4, 8]), st.booleans())
WEIGHTS = st.builds(
    lambda seed, size, offset: (
        size * (np.random.default_rng(seed).normal(size=(6, 16)) + offset)
    ).astype(np.float32),
    st.integers(0, 1000),
    st.sampled_from([1e-4, 0.02, 1.0, 50.0]),
    st.sampled_from([-2.0, 0.0, 2.0]),
)


@given(WEIGHTS, GRIDS)
@settings(max_examples=20, deadline=None)
def test_every_weight_is_rounded_to_the_nearest_of_its_group(weight: np.ndarray, grid: Grid):
    found = round_to_nearest(jnp.asarray(weight), grid)
    half, size = 2 ** (grid.bits - 1), grid.group or 16
    values = np.asarray(found.values, np.float64)
    assert values.min() >= -half and values.max() < half
    scale = np.repeat(np.asarray(found.scale, np.float64), size, axis=1)
    assert found.scale.dtype == np.float16 and (scale > 0).all()
    zero = np.zeros_like(scale)
    if found.zero is not None:
        zero = np.repeat(np.asarray(found.zero, np.float64), size, axis=1)
    assert (found.zero is None) == grid.symmetric
    np.testing.assert_allclose(found.dense(), (values - zero) * scale, rtol=1e-6)
    grid_of_each = np.arange(-half, half)[:, None, None]
    nearest = np.abs((grid_of_each - zero) * scale - weight).min(0)
    error = np.abs((values - zero) * scale - weight)
    np.testing.assert_allclose(error, nearest, rtol=1e-3, atol=1e-5 * np.abs(weight).max())
    # At most a step: half by rounding, half by the ends of the range; float16 is coarse near 0.
    assert (error <= scale * 1.01 + 2.0 ** (grid.bits - 24)).all()


@given(WEIGHTS)
@settings(max_examples=10, deadline=None)
def test_zero_stays_zero(weight: np.ndarray):
    weight[:, ::3] = 0
    for symmetric in (True, False):
        found = round_to_nearest(jnp.asarray(weight), Grid(4, 8, symmetric)).dense()
        assert not np.asarray(found)[:, ::3].any()


def test_weights_without_a_range_have_a_scale():
    found = round_to_nearest(jnp.zeros((2, 8)), Grid(4, 4, False))
    assert (np.asarray(found.scale) > 0).all() and not np.asarray(found.dense()).any()


def test_a_limit_clips():
    weight = jnp.asarray([[8.0, 1.0, -1.0, 0.5]])
    found = round_to_nearest(weight, Grid(4, None, True), jnp.asarray([[1.0]])).dense()
    np.testing.assert_allclose(found, [[14 / 15, 14 / 15, -1.06667, 0.53333]], atol=1e-3)


def test_floats_have_a_scale_for_each_output():
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
    found = round_to_float8(weight)
    assert found.scale.shape == (4, 1)
    np.testing.assert_allclose(found.dense(), weight, rtol=0.07, atol=1e-2)


def test_a_group_must_divide():
    with pytest.raises(ValueError, match="a group of 12 does not divide 16 inputs"):
        round_to_nearest(jnp.zeros((2, 16)), Grid(4, 12, True))


def test_output_error_is_that_of_the_outputs():
    rng = np.random.default_rng(0)
    weight, change, x = (rng.normal(size=s) for s in ((5, 8), (5, 8), (40, 8)))
    found = output_error(*map(jnp.asarray, (weight, weight + change, x.T @ x)))
    wanted = np.square(x @ change.T).sum() / np.square(x @ weight.T).sum()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
