"""Random weights in the formats of files, of the size of a model's weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.quantization import EXPERT_FORMATS, ExpertFormat
from jaxspec.evaluation.benchmarks.random_quantized import random_quantized
from jaxspec.models.linear import linear_shape
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.quantized.float4 import Float4Format, rounded_to_float4
from jaxspec.models.quantized.packed_experts import packed_experts_shape
from pallas_kernels.packed_experts import FORMATS
from tests.helpers.marks import slow


def test_every_format_has_a_name():
    assert set(EXPERT_FORMATS) == set(FORMATS)


@pytest.mark.parametrize("name", ["nvfp4", *map(slow, sorted({*FORMATS} - {"nvfp4"}))])
def test_random_experts_are_of_the_size_of_weights(name: ExpertFormat):
    weight: Any = jax.ShapeDtypeStruct((3, 128, 2, 64), jnp.bfloat16)
    axes = ("experts", "embed", "pair", "mlp")
    shapes = packed_experts_shape(ExpertLinear(weight=weight, axes=axes), name)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: place, shapes)
    made = random_quantized(shapes, places, jax.random.key(0), 0.1)
    same = jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), made, shapes)
    assert all(jax.tree.leaves(same))
    wide = np.asarray(made.of(jnp.arange(3)), np.float32)
    assert wide.shape == weight.shape and 0.07 < wide.std() < 0.13


@pytest.mark.parametrize("form", ["nvfp4", slow("mxfp4")])
def test_random_linears_of_4_bit_floats_are_of_the_size_of_weights(form: Float4Format):
    axes, sizes = ("embed", "pair", "mlp"), (128, 2, 64)
    linear = linear_shape(axes, sizes, jnp.dtype("bfloat16"), bias=True)
    shapes = jax.eval_shape(lambda linear: rounded_to_float4(linear, form), linear)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: place, shapes)
    made = random_quantized(shapes, places, jax.random.key(0), 0.1)
    same = jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), made, shapes)
    assert all(jax.tree.leaves(same))
    wide = np.asarray(made.dense(jnp.dtype("float32")))
    assert wide.shape == (2, 64, 128) and 0.07 < wide.std() < 0.13
