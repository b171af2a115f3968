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
from tests.helpers.random_models import as_dtype, make_params

IN, OUT = 64, (3, 8)  # as an input and the outputs of heads


def made(dtype: Any = jnp.float32, *, bias: bool = False) -> Linear:
    weight = noise(0, IN, *OUT) * np.logspace(-3, 1, OUT[1])
    weight[:, 1, 2] = 0
    own = as_dtype(noise(1, *OUT), dtype) if bias else None
    axes = "hidden", "kv_heads", "head_dim"
    return Linear(weight=as_dtype(weight, dtype), bias=own, axes=axes)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# Each is one program, not one for every operation.
jit_nearest = jax.jit(rounded_to_nearest)
jit_bits = jax.jit(in_eight_bits)
jit_sums = jax.jit(
    lambda linear, x, splits: linear.partial_sums(x, splits, NO_KERNELS), static_argnums=2
)


@jax.jit
def product(linear: Any, x: jax.Array) -> jax.Array:
    return linear(x)


@jax.jit
def dense(linear: ScaledLinear) -> Linear:
    weight = linear.weight * linear.scale
    return Linear(weight=weight.astype(linear.dtype), bias=linear.bias, axes=linear.axes)


def test_no_weight_moves_by_more_than_half_a_step():
    linear = made()
    scaled = jit_nearest(linear)
    assert scaled.weight.dtype == jnp.int8 and scaled.scale.shape == OUT
    before, after = np.asarray(linear.weight), np.asarray(dense(scaled).weight)
    assert np.all(np.abs(after - before) <= 0.501 * np.asarray(scaled.scale))
    largest = np.abs(before).max(axis=0)  # of each output it is kept
    np.testing.assert_allclose(np.abs(after).max(axis=0), largest, rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_products_are_those_of_the_weights_it_stands_for(num_splits: int, bias: bool):
    scaled = jit_nearest(made(bias=bias))
    x = as_dtype(noise(2, 2, 5, IN), np.float32)
    expected = dense(scaled)
    np.testing.assert_allclose(product(scaled, x), product(expected, x), rtol=2e-5, atol=2e-4)
    found, wanted = (jit_sums(linear, x, num_splits) for linear in (scaled, expected))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-4)


def test_in_bfloat16_the_sum_is_rounded_once():
    scaled = jit_nearest(made(jnp.bfloat16))
    x = as_dtype(noise(2, 4, IN), jnp.bfloat16)
    weight = np.asarray(scaled.weight) * np.asarray(scaled.scale)
    exact = np.tensordot(np.asarray(x, np.float32), weight, axes=1)
    found = product(scaled, x)
    assert found.dtype == scaled.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8, atol=1e-4)


def test_many_rows_take_the_weights_as_loaded():
    linear = made(jnp.bfloat16, bias=True)
    [both] = jit_bits([linear])
    few, many = (as_dtype(noise(2, rows, IN), jnp.bfloat16) for rows in (MOST_ROWS, MOST_ROWS + 1))
    np.testing.assert_array_equal(product(both, few), product(jit_nearest(linear), few))
    np.testing.assert_array_equal(product(both, many), product(linear, many))
    weight = jax.device_put(np.asarray(linear.weight)[:, 0])
    [head] = jit_bits([logits := Linear(weight=weight, axes=("hidden", "vocab"))])
    wide = jax.jit(lambda linear, x: linear.float32(x))
    np.testing.assert_array_equal(wide(head, many), wide(logits, many))
    for num_splits in (1, 4):
        found, wanted = (jit_sums(one, many, num_splits) for one in (both, linear))
        np.testing.assert_array_equal(found, wanted)
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
