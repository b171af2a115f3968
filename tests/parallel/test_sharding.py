"""Layouts over meshes of one and two model axes, and the errors of sizes that do not fit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.heads import HeadConfig, head_shapes
from jaxspec.parallel import (
    HIDDEN_AXIS,
    MODEL_AXIS,
    Layout,
    ProductAxes,
    Shards,
    make_mesh,
    mesh_layout,
    partition_specs,
    replica_meshes,
)
from tests.helpers.random_models import tiny_config

EVERY = (MODEL_AXIS, HIDDEN_AXIS)


@functools.cache
def grid() -> Layout:
    """Of 2 x 2 devices. A function, so that collecting the tests needs no devices."""
    return mesh_layout(make_mesh((2, 2)))


def test_a_grid_splits_weights_along_both_dimensions_and_activations_over_all_devices():
    assert grid().heads == grid().ff == grid().vocab == EVERY
    assert grid().spec(("hidden", "two", "ff")) == P(HIDDEN_AXIS, None, MODEL_AXIS)
    assert grid().spec(("ff", "hidden")) == P(MODEL_AXIS, HIDDEN_AXIS)
    assert grid().spec(("two", "ff")) == P(None, EVERY)  # a bias
    assert grid().spec(("hidden",)) == P(HIDDEN_AXIS)
    assert grid().spec(("vocab", "whole_hidden")) == P(EVERY, None)


def test_what_devices_exchange_for_a_product():
    column, row = ("hidden", "two", "ff"), ("ff", "hidden")
    assert grid().product(column) == ProductAxes((), (), (HIDDEN_AXIS,), 1)
    assert grid().product(row) == ProductAxes((HIDDEN_AXIS,), (MODEL_AXIS,), (), 0)
    line = mesh_layout(make_mesh(4))
    assert line.product(column) == ProductAxes((), (), (), 0)
    assert line.product(row) == ProductAxes((), (MODEL_AXIS,), (), 0)


def test_a_head_is_split_over_all_devices_of_its_targets_grid():
    config = tiny_config()
    head = HeadConfig(config.map_layers(lambda layer: layer), "eagle1", (-1,))
    shapes = head_shapes(head, config, jnp.dtype("float32"), Shards.over(make_mesh((2, 2)), grid()))
    assert shapes.layout == Layout(vocab=EVERY, heads=EVERY, ff=EVERY, experts=EVERY)
    specs: Any = partition_specs(shapes)
    assert specs.layers[0].mlp.down.weight == P(EVERY, None)


@pytest.mark.parametrize("size", [1, 4, (1, 4), (2, 1)])
def test_a_grid_of_one_line_is_no_grid(size: Any):
    layout = mesh_layout(make_mesh(size))
    assert len(layout.heads) == (size != 1)
    assert bool(layout.hidden) == (size == (2, 1))


def test_engines_side_by_side_have_grids_of_their_own():
    meshes = [mesh for mesh in replica_meshes(2, (2, 2)) if mesh]
    assert [[one.id for one in mesh.devices.flat] for mesh in meshes] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert {tuple(mesh.shape.items()) for mesh in meshes} == {
        (("data", 1), (MODEL_AXIS, 2), (HIDDEN_AXIS, 2))
    }


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("2", "tensor_parallel must be an int, or two such as .2, 4., got '2'"),
        ((1, 2, 3), "tensor_parallel must be an int, or two such as"),
        ((0, 2), "parallel sizes must be >= 1, got tp 0x2, dp 1, sp 1"),
        ((4, 4), f"tp 4x4, dp 1, sp 1 needs 16 devices, this process has {len(jax.devices())}"),
    ],
)
def test_meshes_that_cannot_be_made(size: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make_mesh(size)
    with pytest.raises(ValueError, match=message):
        replica_meshes(1, size)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"hidden_size": 33}, (2, 2), "33 cannot be split over 2 devices; it can over 1, 3"),
        ({"intermediate_size": 50}, (2, 2), "50 cannot be split over 4 devices; it can over 1, 2"),
        ({}, (2, 3), "4 query and 2 KV heads cannot be split over 6 devices; it can over 1, 2, 4"),
    ],
)
def test_models_that_do_not_fit_a_grid(changes: Any, size: Any, message: str):
    mesh = make_mesh(size)
    shards = Shards.over(mesh, mesh_layout(mesh))
    with pytest.raises(ValueError, match=message):
        decoder_shapes(tiny_config(**changes), jnp.dtype("float32"), shards)


def test_a_weight_from_hidden_states_to_hidden_states_needs_another_layout():
    square = ("hidden", "hidden")
    with pytest.raises(ValueError, match="cannot be split along both hidden dimensions"):
        grid().spec(square)
    assert mesh_layout(make_mesh(4)).spec(square) == P(None, None)


def test_hidden_states_are_split_over_the_last_axes_of_all_else():
    with pytest.raises(ValueError, match="must split heads over them"):
        Layout(vocab=EVERY, heads=(MODEL_AXIS,), ff=EVERY, hidden=(HIDDEN_AXIS,))
