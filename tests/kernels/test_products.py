"""Products and their parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.products import (
    einsum_f32,
    precision_of,
    product_parts,
    scores_f32,
    sum_parts,
    weighted_sum_f32,
)

PRODUCTS = {
    "einsum_f32": lambda x: einsum_f32("bgms,bgns->bgmn", x, x),
    "scores_f32": lambda x: scores_f32(x, x),
    "weighted_sum_f32": lambda x: weighted_sum_f32(x, x),
    "product_parts": lambda x: product_parts(x, x[0, 0], 2),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_parts_add_up_to_the_product(num_parts: int, dtype: jnp.dtype):
    keys = jax.random.split(jax.random.key(num_parts))
    x = jax.random.normal(keys[0], (2, 3, 64), dtype)
    weight = jax.random.normal(keys[1], (64, 5, 7), dtype)
    parts = product_parts(x, weight, num_parts)
    assert parts.shape == (num_parts, 2, 3, 5, 7) and parts.dtype == jnp.float32
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(weight, np.float64), axes=1)
    np.testing.assert_allclose(sum_parts(parts, 2, jnp.dtype(jnp.float32)), exact, atol=1e-4)


def test_a_single_row_is_padded():
    """The reason stands in product_parts; consumers take parts with rows past theirs."""
    x, weight = jnp.ones((1, 1, 8)), jnp.ones((8, 4))
    parts = product_parts(x, weight, 2)
    assert parts.shape == (2, 2, 1, 4)
    np.testing.assert_array_equal(sum_parts(parts, 1, x.dtype), jnp.full((1, 1, 4), 8.0))


def test_one_part_stays_as_it_is():
    part = jnp.arange(6, dtype=jnp.bfloat16).reshape(1, 1, 6)
    np.testing.assert_array_equal(sum_parts(part, 1, part.dtype), part[0])


@pytest.mark.parametrize("name", PRODUCTS)
def test_only_float32_operands_ask_for_all_their_bits(name: str):
    """By default a GPU rounds them to TF32."""

    def lowered(dtype: jnp.dtype) -> str:
        x = jax.ShapeDtypeStruct((2, 2, 8, 8), dtype)
        return jax.jit(PRODUCTS[name]).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    assert "precision = [HIGHEST, HIGHEST]" in lowered(jnp.dtype(jnp.float32))
    narrow = lowered(jnp.dtype(jnp.bfloat16))
    assert "dot_general" in narrow and "HIGHEST" not in narrow


def test_precision_is_highest_if_all_operands_are_float32():
    assert precision_of(jnp.float32) == precision_of("float32", jnp.float32)
    assert precision_of(jnp.float32) == jax.lax.Precision.HIGHEST
    assert precision_of(jnp.float32, jnp.bfloat16) is None
    assert precision_of(jnp.bfloat16) is None
