"""Products and their split-K partial sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.products import (
    einsum_f32,
    precision_of,
    scores_f32,
    split_k_product,
    sum_partials,
    weighted_sum_f32,
)

PRODUCTS = {
    "einsum_f32": lambda x: einsum_f32("bgms,bgns->bgmn", x, x),
    "scores_f32": lambda x: scores_f32(x, x),
    "weighted_sum_f32": lambda x: weighted_sum_f32(x, x),
    "split_k_product": lambda x: split_k_product(x, x[0, 0], 2),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_partial_sums_add_up_to_the_product(num_splits: int, dtype: jnp.dtype):
    keys = jax.random.split(jax.random.key(num_splits))
    x = jax.random.normal(keys[0], (2, 3, 64), dtype)
    weight = jax.random.normal(keys[1], (64, 5, 7), dtype)
    partials = split_k_product(x, weight, num_splits)
    assert partials.shape == (num_splits, 2, 3, 5, 7) and partials.dtype == jnp.float32
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(weight, np.float64), axes=1)
    np.testing.assert_allclose(sum_partials(partials, 2, jnp.dtype(jnp.float32)), exact, atol=1e-4)


def test_a_single_row_is_padded():
    """See split_k_product for the reason. Consumers ignore the rows past theirs."""
    x, weight = jnp.ones((1, 1, 8)), jnp.ones((8, 4))
    partials = split_k_product(x, weight, 2)
    assert partials.shape == (2, 2, 1, 4)
    np.testing.assert_array_equal(sum_partials(partials, 1, x.dtype), jnp.full((1, 1, 4), 8.0))


def test_an_unsplit_product_stays_as_it_is():
    product = jnp.arange(6, dtype=jnp.bfloat16).reshape(1, 1, 6)
    np.testing.assert_array_equal(sum_partials(product, 1, product.dtype), product[0])


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
