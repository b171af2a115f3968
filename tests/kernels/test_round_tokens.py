"""Rounding to 8-bit floats: the reference, and the Hopper kernel interpreted, lowered, run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.benchmark import noise
from pallas_kernels.round_tokens import round_gated, round_tokens
from pallas_kernels.round_tokens.mosaic_gpu import (
    round_gated_mosaic,
    round_groups_mosaic,
    round_tokens_mosaic,
)
from tests.helpers.kernels import interpreted, lowered

CASES = ((1, 512), (5, 4096), (3, 3072), (2, 2048), (33, 14336))


def rows_of(case: tuple[int, int]) -> Any:
    x = noise(0, 0, case, jnp.bfloat16)
    return x.at[-1].multiply(0 if case[0] > 1 else 1e4)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_largest_of_each_group_becomes_448(groups: int):
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    x[1, :16] = 0
    rounded, scale = round_tokens(jnp.asarray(x), groups)
    assert rounded.shape == x.shape and scale.shape == (groups, 32)
    by_group = x.reshape(3, groups, -1)
    largest = np.abs(by_group).max(-1)
    wanted = np.where(largest > 0, largest, 1).astype(np.float32) * np.float32(1 / 448)
    np.testing.assert_array_equal(scale[:, :3].T, wanted)
    steps = (by_group * (np.float32(1) / wanted[..., None])).reshape(x.shape)
    exact = np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(rounded), exact)


@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e-35, 1e-29, 1e30])
def test_rows_of_tiny_and_of_huge_numbers_stay_finite(largest: float):
    x = jnp.asarray([[0.0, largest, -largest / 2, 0.0]], jnp.float32)
    rounded, scale = round_tokens(x)
    found = np.asarray(rounded, np.float64) * float(scale[0, 0])
    np.testing.assert_allclose(found, x, rtol=1e-6, atol=1e-30)


def gate_up_of(case: tuple[int, int]) -> Any:
    rows, width = case
    return 3 * noise(1, 0, (rows, 2, width), jnp.bfloat16)


def assert_units(found: Any, gate_up: Any) -> None:
    """They are silu(gate) * up, rounded to bfloat16 and then to e4m3."""
    rounded, scale = (np.asarray(one, np.float32) for one in found)
    gate, up = np.moveaxis(np.asarray(gate_up, np.float64), 1, 0)
    units = gate / (1 + np.exp(-gate)) * up
    largest = np.abs(units).max(-1, keepdims=True)
    np.testing.assert_allclose(scale[0, : len(units), None], largest / 448, rtol=2**-7)
    step = np.maximum(np.abs(units) * 2.0**-4, largest / 448 * 2.0**-10)  # half of e4m3's steps
    assert (np.abs(rounded * scale[0, : len(units), None] - units) <= 1.2 * step).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_units_are_rounded(case: tuple[int, int]):
    gate_up = gate_up_of(case)
    assert_units(round_gated(gate_up), gate_up)


def rounded_in_groups(x: Any, **options: Any) -> Any:
    return round_tokens(x, x.shape[1] // 128, **options)


def assert_same(found: Any, x: Any) -> None:
    """As the reference: rows, and their scales but for the padding."""
    reference = rounded_in_groups if len(found[1]) > 1 else round_tokens
    for one, other in zip(found, jax.jit(reference)(x), strict=True):
        one, other = (y[:, : len(x)] if y.dtype == jnp.float32 else y for y in (one, other))
        np.testing.assert_array_equal(*(np.asarray(y).view(np.uint8) for y in (one, other)))


# What each operation takes, its function, its kernel, and what its results are checked by.
OPERATIONS: dict[str, Any] = {
    "rows": (rows_of, round_tokens, round_tokens_mosaic, assert_same),
    "groups": (rows_of, rounded_in_groups, round_groups_mosaic, assert_same),
    "units": (gate_up_of, round_gated, round_gated_mosaic, assert_units),
}
each_operation = pytest.mark.parametrize("name", OPERATIONS)


@each_operation
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_interpreted_it_rounds(case: tuple[int, int], name: str):
    make, _, kernel, check = OPERATIONS[name]
    x = make(case)
    check(interpreted(kernel, x, 32, detect_races=True), x)


@each_operation
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_lowers_for_cuda(case: tuple[int, int], name: str):
    make, function, *_ = OPERATIONS[name]
    x = jax.eval_shape(lambda: make(case))
    lowered(functools.partial(function, implementation="mosaic_gpu"), x)


@pytest.mark.gpu
@each_operation
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_device_it_rounds(case: tuple[int, int], name: str):
    make, function, _, check = OPERATIONS[name]
    x = make(case)
    run = jax.jit(functools.partial(function, implementation="mosaic_gpu"))
    first = run(x)
    check(first, x)
    for _ in range(20):
        again = run(x)
        assert jnp.array_equal(first[0].view(jnp.uint8), again[0].view(jnp.uint8)), "a race"


@pytest.mark.parametrize(
    ("x", "groups", "message"),
    [
        (np.zeros((2, 512), np.float32), 1, "float32 rows in 1 groups: bfloat16 and one group"),
        (np.zeros((2, 512), jnp.bfloat16), 2, "rows in 2 groups"),
        (np.zeros((2, 256), jnp.bfloat16), 2, "rows of 256: a multiple of 512 up to 16384"),
        (np.zeros((2, 100), jnp.bfloat16), 1, "rows of 100: a multiple of 256 up to 16384"),
    ],
    ids=["dtype", "groups", "width of groups", "width"],
)
def test_unsupported_arguments_are_named(x: Any, groups: int, message: str):
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        round_tokens(x, groups, implementation="mosaic_gpu")
