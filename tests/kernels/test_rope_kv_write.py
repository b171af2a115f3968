"""Rotation and cache write: the reference, and the Hopper kernel interpreted, lowered, run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pages import LayerPages
from pallas_kernels.rope_kv_write import misfit, rope_kv_write
from pallas_kernels.rope_kv_write.cases import EPS, TEST_CASES, Case, make_arguments
from pallas_kernels.rope_kv_write.mosaic_gpu import rope_kv_write_mosaic
from pallas_kernels.rope_kv_write.reference import rope_kv_write_reference
from tests.helpers.kernels import interpreted, lowered
from tests.helpers.marks import first_is_fast
from tests.helpers.programs import FAST_COMPILE

reference = functools.partial(rope_kv_write_reference, eps=EPS)
run_reference = jax.jit(reference, compiler_options=FAST_COMPILE)
kernel = functools.partial(rope_kv_write, eps=EPS, implementation="mosaic_gpu")


def assert_same(found: Any, case: Case) -> None:
    """As the reference, but for the last bits of a bfloat16; the null page holds anything."""
    found, expected = jax.device_get((found, run_reference(*make_arguments(case, jnp.bfloat16))))
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        keep = slice(None) if index == 0 else slice(1, None)
        np.testing.assert_allclose(
            one[keep].astype(np.float32), other[keep].astype(np.float32), rtol=2**-6, atol=2**-7
        )


@pytest.mark.parametrize("case", TEST_CASES, ids=str)
def test_heads_are_normed_rotated_and_written(case: Case):
    arguments = jax.device_get(make_arguments(case, jnp.float32))
    partials, rope, (q_norm, k_norm), (k_pages, v_pages, *_), slots = arguments
    heads = partials.sum(0)[: case.batch]
    queries, keys, values = heads[..., :-2, :], heads[..., -2, :], heads[..., -1, :]
    half = case.pairs or case.head_dim // 2

    def turned(x: np.ndarray, weight: Any) -> np.ndarray:
        if weight is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * np.asarray(weight)
        angle = np.arctan2(rope[:, :, 1, 1], rope[:, :, 0, 1])
        angle = angle.reshape(*angle.shape[:2], *(1,) * (x.ndim - 3), half)
        pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)

    run = jax.jit(functools.partial(rope_kv_write, eps=EPS), compiler_options=FAST_COMPILE)
    q, new_k, new_v = jax.device_get(run(*arguments))
    np.testing.assert_allclose(q.reshape(queries.shape), turned(queries, q_norm), atol=2e-5)
    wanted_k, wanted_v = np.array(k_pages), np.array(v_pages)
    page, offset = np.asarray(slots) // case.page_size, np.asarray(slots) % case.page_size
    wanted_k[page, :, offset] = turned(keys, k_norm)
    wanted_v[page, :, offset] = values
    np.testing.assert_allclose(new_k[1:], wanted_k[1:], atol=2e-5)
    np.testing.assert_allclose(new_v[1:], wanted_v[1:], atol=1e-6)


@first_is_fast(TEST_CASES)
def test_interpreted_it_is_the_reference(case: Case):
    arguments = make_arguments(case, jnp.bfloat16)
    assert_same(interpreted(rope_kv_write_mosaic, *arguments, eps=EPS), case)


@first_is_fast(TEST_CASES, 3)
def test_it_lowers_for_cuda(case: Case):
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    lowered(kernel, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TEST_CASES, Case(8, 60, 8, 4, num_splits=2)], ids=str)
def test_on_the_device_it_is_the_reference(case: Case):
    assert_same(jax.jit(kernel)(*make_arguments(case, jnp.bfloat16)), case)


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (Case(1, 1, 1, 1, head_dim=64), jnp.bfloat16, "heads of 64: they must be 128 or 256 wide"),
        (Case(1, 1, 1, 1), jnp.float32, "both must be bfloat16"),
        (Case(1, 1, 1, 1, pairs=3), jnp.bfloat16, "heads of which 3 pairs are rotated"),
    ],
    ids=["width", "dtype", "pairs"],
)
def test_unsupported_arguments_are_named(case: Case, dtype: Any, message: str):
    partials, rope, _, pages, _ = arguments = make_arguments(case, dtype)
    assert message in str(misfit(partials, pages.k, pages.v, pairs=rope.shape[-1]))
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        kernel(*arguments)


def test_only_the_first_entries_are_rotated():
    """They are rotated as heads of that width are."""
    arguments = make_arguments(Case(2, 3, 4, 2), jnp.float32)
    partials, rope, norms, pages, slots = arguments
    part = rope[..., :24]
    found = reference(partials, part, norms, pages, slots)
    narrow = LayerPages(pages.k[..., :48], pages.v[..., :48])
    expected = reference(partials[..., :48], part, norms, narrow, slots)
    unrotated = jnp.zeros_like(rope).at[:, :, 0].set(1.0)
    plain = reference(partials, unrotated, norms, pages, slots)
    for mine, rotated, kept in zip(found, expected, plain, strict=True):
        np.testing.assert_array_equal(mine[..., :48], rotated)
        np.testing.assert_array_equal(mine[..., 48:], kept[..., 48:])
