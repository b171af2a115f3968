"""Float4Linear: the numbers of a file, in each order, on each way to a product."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.quantized import float4
from jaxspec.models.quantized.float4 import (
    Float4Linear,
    float4_shape,
    in_float4_order,
    rounded_to_float4,
)
from jaxspec.models.quantized.float8 import as_linear
from pallas_kernels.packed_float_product.mosaic_gpu import packed_float_product_mosaic
from pallas_kernels.selection import Kernels
from tests.helpers.four_bit_checkpoints import meant
from tests.helpers.kernels import interpreted
from tests.helpers.marks import slow
from tests.helpers.random_models import as_dtype

FORMS = ("nvfp4", "mxfp4")
GROUP = {"nvfp4": 16, "mxfp4": 32}
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
AXES = ("hidden", "two", "ff")
# Each is one program, not one for every operation.
jit_order = jax.jit(in_float4_order)
jit_dense = jax.jit(Float4Linear.dense, static_argnums=1)
jit_linear = jax.jit(as_linear, static_argnums=1)


def random_linear(
    form: str, size: int = 128, outputs: tuple[int, ...] = (2, 32), dtype: Any = BFLOAT16
) -> tuple[Float4Linear, np.ndarray]:
    """As a file has it, with a factor for each output and scales of 0 and below, and the weights
    [*out, in] that it means by a table."""
    random = np.random.default_rng(size)
    codes = random.integers(0, 16, (*outputs, size))
    by_group, factor = (*outputs, size // GROUP[form]), None
    if form == "nvfp4":
        stored = (random.normal(size=by_group) / 64).astype(jnp.float8_e4m3fn)
        assert (stored == 0).any() and (stored < 0).any()
        factor = random.uniform(0.5, 1.5, outputs).astype(np.float32)
        scale = stored.astype(np.float32) * factor[..., None]
    else:
        stored = random.integers(118, 124, by_group).astype(np.uint8)
        scale = np.exp2(stored.astype(np.float32) - 127)
    made = Float4Linear(
        values=jax.device_put((codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)),
        scale=jax.device_put(np.moveaxis(stored, -1, 0)),
        factor=None if factor is None else jax.device_put(factor),
        axes=AXES[: 1 + len(outputs)],
        activations=jnp.dtype(dtype),
    )
    return made, meant(codes, scale)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_table_in_either_order(form: str):
    linear, wanted = random_linear(form)
    ordered = jit_order(linear)
    assert ordered.reordered and in_float4_order(ordered) is ordered
    assert (
        ordered.values.nbytes + ordered.scale.nbytes == linear.values.nbytes + linear.scale.nbytes
    )
    for one in (linear, ordered):
        np.testing.assert_array_equal(jit_dense(one, FLOAT32), wanted)
        np.testing.assert_array_equal(jit_dense(one, BFLOAT16), wanted.astype(jnp.bfloat16))
    wide = jit_linear(ordered, FLOAT32)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(wide.weight), 0, -1), wanted)


def test_sizes_that_the_kernel_does_not_take_stay_as_they_are():
    for size, outputs in ((48, (64,)), (128, (2, 16))):
        linear, wanted = random_linear("nvfp4", size, outputs)
        assert in_float4_order(linear) is linear
        np.testing.assert_array_equal(jit_dense(linear, FLOAT32), wanted)


@pytest.mark.parametrize("form", ["nvfp4", slow("mxfp4")])
def test_products_are_those_of_a_linear(form: str, monkeypatch: pytest.MonkeyPatch):
    """Of all outputs at once, and of a few tiles of them."""
    linear, wanted = random_linear(form, dtype=FLOAT32)
    bias = as_dtype(np.random.default_rng(1).normal(size=(2, 32)), np.float32)
    x = np.random.default_rng(2).normal(size=(3, 5, 128)).astype(np.float32)
    expected = np.einsum("bth,nfh->btnf", x.astype(np.float64), wanted) + np.asarray(bias)
    for most in (float4.MOST_WIDENED, 64 * 128 // 4):
        monkeypatch.setattr(float4, "MOST_WIDENED", most)
        for one in (linear.replace(bias=bias), jit_order(linear.replace(bias=bias))):
            products = jax.jit(lambda linear, x: (linear(x), linear.float32(x)))
            for product in products(one, x):
                np.testing.assert_allclose(product, expected, rtol=0, atol=1e-5)


def test_the_kernel_takes_reordered_weights_and_rows_of_bfloat16():
    """And a product by it is that of the weights."""
    linear, wanted = random_linear("nvfp4")
    ordered, kernels = jit_order(linear), Kernels(frozenset({"packed_float_product"}))
    x = as_dtype(np.random.default_rng(2).normal(size=(2, 3, 128)), jnp.bfloat16)
    traced = jax.jit(lambda x: ordered(x, kernels)).trace(x)
    assert "packed_float_product" in str(traced.jaxpr)
    for other, rows in ((linear, x), (ordered, x.astype(jnp.float32))):
        traced = jax.jit(lambda x, other=other: other(x, kernels)).trace(rows)
        assert "packed_float_product" not in str(traced.jaxpr)
    found = interpreted(
        packed_float_product_mosaic, x.reshape(6, 128), ordered.packed, dtype=FLOAT32
    )
    rows = np.asarray(x, np.float64).reshape(6, 128)
    np.testing.assert_allclose(found, rows @ wanted.reshape(64, 128).T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_rounding_finds_the_nearest_numbers(form: Any):
    weight = np.random.default_rng(0).normal(size=(128, 2, 32)).astype(np.float32)
    rounded = jax.jit(functools.partial(rounded_to_float4, form=form))
    made = rounded(Linear(weight=jax.device_put(weight), axes=AXES))
    assert made.reordered
    found, wanted = np.asarray(jit_dense(made, FLOAT32)), np.moveaxis(weight, 0, -1)
    largest = np.abs(wanted).reshape(2, 32, -1, GROUP[form]).max(-1, keepdims=True)
    # Scales of e4m3 are off by up to a sixteenth; powers of two by up to a factor of 2.
    most = {"nvfp4": 17 / 16 / 6, "mxfp4": 2 / 6}[form]
    errors = np.abs(found - wanted).reshape(2, 32, -1, GROUP[form])
    assert (errors <= most * largest).all()
    again = jit_dense(rounded(jit_linear(made, FLOAT32)), FLOAT32)
    np.testing.assert_allclose(again, found, rtol=0.07 if form == "nvfp4" else 0)


def test_inputs_must_be_whole_groups():
    linear = Linear(weight=jnp.ones((40, 8)), axes=("hidden", "ff"))
    with pytest.raises(ValueError, match="40 inputs are no multiple of a group of 16"):
        rounded_to_float4(linear, "nvfp4")


def test_shapes_are_those_of_a_file():
    linear = linear_shape(AXES, (64, 2, 32), BFLOAT16)
    made = float4_shape(linear, 4, jnp.dtype("float8_e4m3fn"), factor=True)
    given, _ = random_linear("nvfp4", 64)
    assert jax.tree.structure(made) == jax.tree.structure(given)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(given), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert made.logical_axes()["factor"] == ("two", "ff")
