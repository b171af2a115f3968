"""Pages of 8-bit keys and values: the format in NumPy, the references, and the kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.float8 import LARGEST, decode, encode
from pallas_kernels.kv_compact import cases as compact_cases
from pallas_kernels.kv_compact import kv_compact
from pallas_kernels.kv_compact.mosaic_gpu import kv_compact_mosaic
from pallas_kernels.rope_kv_write import cases as rope_cases
from pallas_kernels.rope_kv_write import rope_kv_write
from pallas_kernels.rope_kv_write.mosaic_gpu import rope_kv_write_mosaic
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast
from tests.helpers.programs import FAST_COMPILE

E4M3 = ml_dtypes.float8_e4m3fn
EPS = rope_cases.EPS


def numbers() -> np.ndarray:
    """Every float32 that matters: both signs, halfway cases, denormals, and far too large ones."""
    values = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    halfway = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(halfway, np.float32(far)) for far in (-np.inf, np.inf)]
    beyond = np.array([448.1, 463.9, 464, 465, 1e5, 3e38, np.inf, 1e-12, 1e-40], np.float32)
    return np.concatenate([values, halfway, *near, beyond, -beyond]).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_number_is_scaled_saturated_and_rounded_to_the_nearest(dtype: Any):
    x = jnp.asarray(numbers(), dtype)[:, None, None]  # [T, G, D]
    for scale in (1.0, 0.0371, 5.0):
        stored = jax.jit(encode)(x, jnp.float32([scale]))
        with np.errstate(over="ignore"):
            wanted = np.asarray(x.astype(jnp.float32)) / np.float32(scale)
        wanted = np.clip(wanted, -LARGEST, LARGEST).astype(E4M3)
        np.testing.assert_array_equal(stored, wanted.view(np.uint8))
        assert not np.isnan(wanted.astype(np.float32)).any()


def test_bytes_are_widened_exactly():
    stored = np.arange(256, dtype=np.uint8)
    wide = stored.view(E4M3).astype(np.float32)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        found = jax.jit(functools.partial(decode, dtype=dtype))(stored)
        np.testing.assert_array_equal(np.asarray(found, np.float32), wide)


def test_nan_stays_nan():
    stored = encode(jnp.full((1, 1, 1), jnp.nan), jnp.ones(1))
    assert jnp.isnan(decode(stored, jnp.float32)).all()


@pytest.mark.parametrize("case", rope_cases.TEST_CASES, ids=str)
def test_keys_and_values_are_written_as_bytes(case: Any):
    """Of the keys and values that are written in float32 otherwise."""
    wide = rope_cases.make_arguments(case)
    arguments = rope_cases.make_float8_arguments(case)
    run = functools.partial(rope_kv_write, eps=EPS, dtype=jnp.float32)
    run = jax.jit(run, compiler_options=FAST_COMPILE)
    q, *pages = jax.device_get(run(*wide))
    found_q, *found = jax.device_get(run(*arguments))
    np.testing.assert_array_equal(found_q, q)
    *_, stored, slots = arguments
    index = np.asarray(slots) // case.page_size, slice(None), np.asarray(slots) % case.page_size
    pairs = zip(pages, stored[:2], found, stored[2:], strict=True)
    for written, before, after, scale in pairs:
        wanted = np.array(before)
        wanted[index] = encode(written[index], scale)
        np.testing.assert_array_equal(after[1:], wanted[1:])


@pytest.mark.parametrize("case", rope_cases.TEST_CASES[1:2], ids=str)
def test_interpreted_the_kernel_writes_the_same(case: Any):
    arguments = rope_cases.make_float8_arguments(case, jnp.bfloat16)
    options = {"eps": EPS, "dtype": jnp.dtype("bfloat16")}
    expected = rope_kv_write(*arguments, **options)
    q, *pages = jax.device_get(interpreted(rope_kv_write_mosaic, *arguments, **options))
    np.testing.assert_allclose(
        q.astype(np.float32), np.asarray(expected[0], np.float32), rtol=2**-6, atol=2**-7
    )
    for one, other in zip(pages, expected[1:], strict=True):
        one, other = (x[1:].view(E4M3).astype(np.float32) for x in (one, np.asarray(other)))
        np.testing.assert_allclose(one, other, rtol=2**-3, atol=2**-9)
        assert (one != other).mean() < 0.01, "more than a rare rounding differs"


@first_is_fast(rope_cases.TEST_CASES, 3)
def test_writing_lowers_for_cuda(case: Any):
    arguments = jax.eval_shape(lambda: rope_cases.make_float8_arguments(case, jnp.bfloat16))
    kernel = functools.partial(
        rope_kv_write, eps=EPS, dtype=jnp.bfloat16, implementation="mosaic_gpu"
    )
    lowered(kernel, *arguments)


def compact_arguments(case: Any) -> Any:
    """Of caches of bytes."""
    pages, source, destination = compact_cases.make_arguments(case)
    return tuple(encode(one, jnp.ones(one.shape[2])) for one in pages), source, destination


@pytest.mark.parametrize("case", compact_cases.TEST_CASES[:1], ids=str)
def test_interpreted_compaction_moves_bytes(case: Any):
    arguments = compact_arguments(case)
    found = interpreted(kv_compact_mosaic, *arguments)
    for one, other in zip(found, kv_compact(*arguments), strict=True):
        np.testing.assert_array_equal(one[1:], other[1:])


@pytest.mark.parametrize("case", compact_cases.TEST_CASES, ids=str)
def test_compaction_of_bytes_lowers_for_cuda(case: Any):
    arguments = jax.eval_shape(lambda: compact_arguments(case))
    kernel = functools.partial(kv_compact, implementation="mosaic_gpu")
    lowered(kernel, *arguments)
