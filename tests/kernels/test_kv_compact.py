"""Compaction of all layers' caches: the reference, and the kernel interpreted, lowered, run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.kv_compact.cases import TEST_CASES, Case, make_arguments
from pallas_kernels.kv_compact.mosaic_gpu import kv_compact_mosaic
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast


def expected(case: Case) -> list[np.ndarray]:
    """The caches without the null page, whose content is unspecified."""
    pages, source, destination = make_arguments(case, jnp.bfloat16)
    moved = []
    for one in map(np.array, pages):
        slots = one.swapaxes(1, 2).reshape(-1, case.kv_heads, case.head_dim)
        slots[np.asarray(destination)] = slots[np.asarray(source)]
        shape = (len(one), case.page_size, case.kv_heads, case.head_dim)
        moved.append(slots.reshape(shape).swapaxes(1, 2)[1:])
    return moved


def assert_same(found: tuple[Any, ...], case: Case) -> None:
    for one, other in zip(found, expected(case), strict=True):
        np.testing.assert_array_equal(one[1:], other)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_rows_move_in_every_cache(case: Case):
    assert_same(kv_compact(*make_arguments(case, jnp.bfloat16)), case)


@first_is_fast(TEST_CASES)
def test_interpreted_it_does_the_same(case: Case):
    assert_same(interpreted(kv_compact_mosaic, *make_arguments(case, jnp.bfloat16)), case)


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_it_lowers_for_cuda(case: Case):
    lowered(kv_compact_mosaic, *jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(32, 60, 8, 32, kv_heads=8)], ids=str)
def test_on_the_device_it_does_the_same(case: Case):
    function = jax.jit(kv_compact, static_argnums=3, donate_argnums=0)
    for _ in range(5):
        assert_same(function(*make_arguments(case, jnp.bfloat16), "mosaic_gpu"), case)


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (TEST_CASES[0], jnp.float32, "not bfloat16 of one shape"),
        (Case(1, 4, 2, 2, kv_heads=1, head_dim=64), jnp.bfloat16, "heads of 64: they must be 128"),
        (Case(1, 4, 2, 2, kv_heads=1, head_dim=384), jnp.bfloat16, "heads of 384"),
        (Case(1, 60, 40, 2, kv_heads=1), jnp.bfloat16, "40 rows per sequence"),
    ],
    ids=["dtype", "narrow", "wide", "rows"],
)
def test_unsupported_arguments_are_named(case: Case, dtype: Any, message: str):
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        kv_compact(*make_arguments(case, dtype), "mosaic_gpu")
