"""Bamba and Granite 4 with Mamba-2 layers: what their configs say, and what is refused."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.recurrent import Mamba2Config
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.mixers.mamba2 import mamba2_shape
from jaxspec.parallel import Shards, make_mesh, mesh_layout

BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "attn_layer_indices": [1],
}
GRANITE: dict[str, Any] = {
    **{name: value for name, value in BAMBA.items() if name != "attn_layer_indices"},
    "model_type": "granitemoehybrid",
    "num_local_experts": 0,
    "layer_types": ["mamba", "attention", "mamba"],
}
MAMBA = Mamba2Config(num_groups=1, num_heads=8, state_dim=256, head_dim=8)


@pytest.mark.parametrize("raw", [BAMBA, GRANITE])
def test_layers_are_as_their_kinds_or_indices_say(raw: dict[str, Any]):
    model = parse_model_config(raw)
    assert model.is_recurrent and [layer.mixer for layer in model.layers[::2]] == [MAMBA] * 2
    assert isinstance(model.layers[1].mixer, AttentionConfig)
    assert model.layers[1].attention.rope.rotary_dim == (4 if raw is BAMBA else 0)
    given = raw | {"mamba_d_head": 8, "mamba_conv_bias": False, "mamba_n_groups": 2}
    other = dataclasses.replace(MAMBA, taps_bias=False, num_groups=2)
    assert parse_model_config(given).layers[0].mixer == other


def test_names_of_kinds_are_those_of_both_versions():
    newer = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    older = {name: value for name, value in GRANITE.items() if name != "layer_types"}
    older["layers_block_type"] = GRANITE["layer_types"]
    models = [parse_model_config(raw) for raw in (GRANITE, GRANITE | newer, older)]
    assert models[0] == models[1] == models[2]


def test_attention_of_granite_rotates_if_it_says_so():
    ropes = [
        parse_model_config(GRANITE | {"position_embedding_type": kind}).layers[1].attention.rope
        for kind in ("rope", "nope", None)
    ]
    assert [rope.rotary_dim for rope in ropes] == [None, 0, 0]


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (BAMBA, {"mamba_d_head": 16}, "mamba_d_head = 16 contradicts mamba_expand * hidden_size /"),
        (BAMBA, {"mamba_n_heads": 5}, "mamba_expand * hidden_size (64) must be a multiple of mam"),
        (BAMBA, {"mamba_n_groups": 3}, "num_heads (8) must be a multiple of num_groups (3)"),
        (BAMBA, {"mamba_n_groups": 0}, "mamba_n_groups must be a positive integer, got 0"),
        (BAMBA, {"mamba_d_conv": 1}, "taps must be at least 2, got 1"),
        (BAMBA, {"mamba_conv_bias": 1}, "mamba_conv_bias must be true or false, got 1"),
        (BAMBA, {"attn_layer_indices": [3]}, "attn_layer_indices must be a list of indices below"),
        (BAMBA, {"attn_rotary_emb": 8}, "attn_rotary_emb = 8 contradicts half of a head (= 4)"),
        (BAMBA, {"partial_rotary_factor": 1.0}, "partial_rotary_factor = 1.0 is not supported"),
        (
            BAMBA,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
            "partial_rotary_factor of rope parameters must be 0.5 in a bamba model",
        ),
        (BAMBA, {"time_step_limit": [0.0, 0.1]}, "time_step_limit = [0.0, 0.1] is not supported"),
        (GRANITE, {"layer_types": ["mamba"]}, "layer_types has 1 entries for 3 layers"),
        (GRANITE, {"layer_types": None}, "layer_types = None is not supported, only a list of"),
    ],
)
def test_what_is_not_supported_is_named(raw: dict[str, Any], change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(raw | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "devices", "message"),
    [
        (1, 3, "8 Mamba heads in 1 groups cannot be split over 3 devices; it can over 1, 2, 4"),
        (4, 3, "8 Mamba heads in 4 groups cannot be split over 3 devices; it can over 1, 2, 4"),
    ],
)
def test_heads_that_cannot_be_split_are_refused(groups: int, devices: int, message: str):
    mesh = make_mesh(devices)
    config = dataclasses.replace(MAMBA, num_groups=groups)
    with pytest.raises(ValueError, match=message):
        mamba2_shape(config, 32, jnp.dtype(jnp.float32), Shards.over(mesh, mesh_layout(mesh)), 32)


def test_groups_are_repeated_where_there_are_more_devices():
    mesh = make_mesh(4)
    shards = Shards.over(mesh, mesh_layout(mesh))
    config = dataclasses.replace(MAMBA, num_groups=2)
    shape = mamba2_shape(config, 32, jnp.dtype(jnp.float32), shards, 32)
    assert shape.a_log.shape == (4, 2) and shape.taps.shape == (4, 4, 2 * 256 + 2 * 8)
