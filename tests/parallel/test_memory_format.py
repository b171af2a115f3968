"""Weights in the layout in which a TPU's products read them, on a CPU: it changes no token.

tests/compiled/test_compiled_for_tpu.py looks for copies in what the TPU's compiler makes of it.
"""

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.linear import Linear
from jaxspec.parallel.memory_format import product_layout, weight_place
from jaxspec.parallel.placement import committed, in_place_of
from tests.helpers.marks import slow
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    jit_decode,
    make_params,
    random_prompts,
    read_prompts,
    texts,
)

CPU = SingleDeviceSharding(jax.devices("cpu")[0])


def as_on_a_tpu(leaf: jax.Array) -> jax.Array:
    if leaf.ndim < 3:
        return leaf
    return jax.device_put(leaf, Format(product_layout(leaf.ndim), CPU))


def test_the_input_stands_before_the_last_dimension():
    assert product_layout(3).major_to_minor == (1, 0, 2)  # [in, two, ff]
    assert product_layout(4).major_to_minor == (1, 2, 0, 3)  # [in, G, R, D]


@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 2, 6)])
def test_elsewhere_a_weight_has_a_sharding_alone(shape: tuple[int, ...]):
    assert weight_place(shape, CPU) is CPU


@pytest.mark.parametrize("drafter", [slow("none"), slow("eagle3")])
def test_programs_take_weights_as_they_lie(drafter: str):
    depth = 0 if drafter == "none" else 2
    params = make_params(drafter, SpeculationConfig.chain(depth))
    moved = jax.tree.map(as_on_a_tpu, params)
    qkv = moved.target.layers[0].mixer.qkv.weight
    assert qkv.format.layout.major_to_minor == (1, 2, 0, 3)
    found = []
    for own in (params, moved):
        prompts = random_prompts((7, 12))
        state = admit_prompts(own, empty_state(own, 2, 64), prompts)
        state, _ = jit_decode(own, read_prompts(own, state), 4, max_rounds=4)
        found.append(texts(state))
    assert found[0] == found[1]


def test_a_product_takes_a_weight_as_it_lies():
    weight = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    linear = Linear(weight=as_on_a_tpu(jax.numpy.asarray(weight)), axes=("hidden", "two", "ff"))
    found = jax.jit(linear.__class__.__call__)(linear, np.ones((1, 4), np.float32))
    np.testing.assert_array_equal(found, weight.sum(axis=0)[None])


def test_new_weights_take_the_place_of_others():
    leaf = jax.numpy.arange(24.0).reshape(4, 2, 3)
    new = in_place_of({"w": committed(leaf)}, {"w": np.asarray(leaf) + 1})
    assert new["w"].sharding == CPU
    np.testing.assert_array_equal(new["w"], leaf + 1)
