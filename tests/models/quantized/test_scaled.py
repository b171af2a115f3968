"""Weights of 8-bit integers with a scale for each output."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec import load
from jaxspec.functional import EngineParams
from jaxspec.models.linear import Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.models.quantized.scaled import (
    MOST_ROWS,
    ScaledLinear,
    in_eight_bits,
    only_eight_bits,
    rounded_to_nearest,
)
from jaxspec.models.quantized.schemes import in_four_bits
from jaxspec.parallel import make_mesh
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.engines import CHAIN, sampled_texts
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import make_params

IN, OUT = 64, (3, 8)  # as an input and the outputs of heads


def made(dtype: Any = jnp.float32, *, bias: bool = False) -> Linear:
    keys = jax.random.split(jax.random.key(0), 2)
    weight = jax.random.normal(keys[0], (IN, *OUT), dtype) * jnp.logspace(-3, 1, OUT[1])
    weight = weight.at[:, 1, 2].set(0).astype(dtype)
    own = jax.random.normal(keys[1], OUT, dtype) if bias else None
    return Linear(weight=weight, bias=own, axes=("hidden", "kv_heads", "head_dim"))


def dense(linear: ScaledLinear) -> Linear:
    weight = linear.weight * linear.scale
    return Linear(weight=weight.astype(linear.dtype), bias=linear.bias, axes=linear.axes)


def test_no_weight_moves_by_more_than_half_a_step():
    linear = made()
    scaled = rounded_to_nearest(linear)
    assert scaled.weight.dtype == jnp.int8 and scaled.scale.shape == OUT
    error = np.abs(dense(scaled).weight - linear.weight)
    assert np.all(error <= 0.501 * scaled.scale)
    largest = np.abs(linear.weight).max(axis=0)  # of each output it is kept
    np.testing.assert_allclose(np.abs(dense(scaled).weight).max(axis=0), largest, rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_products_are_those_of_the_weights_it_stands_for(num_splits: int, bias: bool):
    scaled = rounded_to_nearest(made(bias=bias))
    x = jax.random.normal(jax.random.key(1), (2, 5, IN))
    expected = dense(scaled)
    np.testing.assert_allclose(scaled(x), expected(x), rtol=2e-5, atol=2e-4)
    found = scaled.partial_sums(x, num_splits, NO_KERNELS)
    wanted = expected.partial_sums(x, num_splits, NO_KERNELS)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-4)


def test_in_bfloat16_the_sum_is_rounded_once():
    scaled = rounded_to_nearest(made(jnp.bfloat16))
    x = jax.random.normal(jax.random.key(1), (4, IN), jnp.bfloat16)
    exact = jnp.tensordot(x.astype(jnp.float32), scaled.weight * scaled.scale, axes=1)
    found = scaled(x)
    assert found.dtype == scaled.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=2**-8, atol=1e-4)


def test_many_rows_take_the_weights_as_loaded():
    linear = made(jnp.bfloat16, bias=True)
    [both] = in_eight_bits([linear])
    keys = jax.random.split(jax.random.key(1))
    few, many = (
        jax.random.normal(key, (rows, IN), jnp.bfloat16)
        for key, rows in zip(keys, (MOST_ROWS, MOST_ROWS + 1), strict=True)
    )
    np.testing.assert_array_equal(both(few), rounded_to_nearest(linear)(few))
    np.testing.assert_array_equal(both(many), linear(many))
    [head] = in_eight_bits([logits := Linear(weight=linear.weight[:, 0], axes=("hidden", "vocab"))])
    np.testing.assert_array_equal(head.float32(many), logits.float32(many))
    for num_splits in (1, 4):
        found = both.partial_sums(many, num_splits, NO_KERNELS)
        np.testing.assert_array_equal(found, linear.partial_sums(many, num_splits, NO_KERNELS))
    [only] = only_eight_bits([both])
    assert isinstance(only, ScaledLinear) and only.loaded is None


def test_logits_are_float32():
    scaled = rounded_to_nearest(Linear(weight=jnp.ones((IN, 40)), axes=("hidden", "vocab")))
    assert scaled.float32(jnp.ones((2, IN))).dtype == jnp.float32


def in_bits(bits: int, params: EngineParams) -> EngineParams:
    own = params.drafter
    own = in_eight_bits(own) if bits == 8 else in_four_bits(own, params.mesh)
    return params.replace(drafter=own)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_drafter_in_fewer_bits_changes_no_text(drafter: str, bits: int):
    params = make_params(drafter, CHAIN)
    scaled = in_bits(bits, params)
    kinds = {type(x) for x in jax.tree.leaves(scaled.drafter, is_leaf=is_weight)}
    assert {4: GroupedLinear, 8: ScaledLinear}[bits] in kinds and Linear not in kinds  # but in them
    assert sampled_texts(scaled) == sampled_texts(params)


def is_weight(node: Any) -> bool:
    return isinstance(node, Linear | ScaledLinear | GroupedLinear)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_over_a_mesh_it_is_split_as_the_weights_were(bits: int):
    params = make_params("eagle3", CHAIN)
    split = on_mesh(params, make_mesh(2, 1))
    scaled = in_bits(bits, split)
    drafter: Any = scaled.drafter
    own: Any = split.drafter
    down, before = drafter.head.layers[0].mlp.down, own.head.layers[0].mlp.down
    if bits == 8:
        assert down.weight.sharding.spec == before.weight.sharding.spec
    else:
        assert down.values.sharding.spec == P(None, *before.weight.sharding.spec)
    assert sampled_texts(scaled) == sampled_texts(params)


def test_bad_bits_are_refused():
    with pytest.raises(ValueError, match="drafter_bits must be 4 or 8, or None"):
        load(drafter_bits=3)
    with pytest.raises(ValueError, match="drafter_bits needs a drafter with weights"):
        load(drafter="ngram", drafter_bits=8)
