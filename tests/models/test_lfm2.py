"""LFM2: what its configs say, and tensors under the names that its checkpoints have."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.recurrent import ShortConvConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import NoDrafter
from jaxspec.evaluation.benchmarks.floors import floor_bytes
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.families.lfm2 import LFM2
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.json.values import read_json
from jaxspec.models.mixers.short_conv import short_conv_shape
from jaxspec.models.tensors import joining, splitting
from jaxspec.parallel import Shards, make_mesh, mesh_layout
from tests.helpers.parity import load
from tests.helpers.random_models import random_target

RAW: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "full_attn_idxs": [1],
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    ("change", "units"),
    [
        ({}, 256),  # two thirds, rounded up
        ({"block_multiple_of": 10}, 40),
        ({"block_multiple_of": 10, "block_ffn_dim_multiplier": 1.3}, 50),
        ({"block_ffn_dim_multiplier": None}, 32),
        ({"block_auto_adjust_ff_dim": False}, 48),
        ({"intermediate_size": 12288}, 8192),
        ({"intermediate_size": 6656}, 4608),
    ],
)
def test_units_of_mlps_are_two_thirds_rounded_up(change: dict[str, Any], units: int):
    raw = RAW | change
    assert {layer.mlp for layer in parse_model_config(raw).layers} == {DenseConfig(units)}
    older = {name: value for name, value in raw.items() if name != "intermediate_size"}
    older["block_ff_dim"] = raw["intermediate_size"]
    assert parse_model_config(older) == parse_model_config(raw)


def test_layers_are_as_their_kinds_or_indices_say():
    kinds = {"layer_types": ["conv", "full_attention", "conv"]}
    model = parse_model_config(RAW | kinds)
    for same in (RAW, RAW | kinds | {"full_attn_idxs": None}):
        assert parse_model_config(same) == model
    assert [type(layer.mixer) for layer in model.layers] == [
        ShortConvConfig, AttentionConfig, ShortConvConfig
    ]  # fmt: skip
    assert model.is_recurrent and model.layers[0].mixer == ShortConvConfig(taps=3, bias=False)
    attention = model.layers[1].attention
    assert (attention.rope.theta, attention.qk_norm, attention.qkv_bias) == (1e6, True, False)
    assert (model.rms_norm_eps, model.max_position) == (1e-5, 128_000)
    of_attention = parse_model_config({**RAW, "full_attn_idxs": None})
    assert not of_attention.is_recurrent


def test_absent_keys_tie_embeddings():
    raw = {name: value for name, value in RAW.items() if name != "tie_word_embeddings"}
    assert parse_model_config(raw).tie_word_embeddings
    assert not parse_model_config(raw | {"tie_embedding": False}).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_L_cache": 1}, "taps must be at least 2, got 1"),
        ({"conv_L_cache": 0}, "conv_L_cache must be a positive integer, got 0"),
        ({"conv_bias": 1}, "conv_bias must be true or false, got 1"),
        ({"block_auto_adjust_ff_dim": "x"}, "block_auto_adjust_ff_dim must be true or false"),
        ({"block_multiple_of": 0}, "block_multiple_of must be a positive integer, got 0"),
        ({"block_ffn_dim_multiplier": "x"}, "block_ffn_dim_multiplier must be a number above 0"),
        ({"full_attn_idxs": [3]}, "full_attn_idxs must be a list of indices below 3, got [3]"),
        ({"full_attn_idxs": 1}, "full_attn_idxs must be a list of indices below 3, got 1"),
        ({"layer_types": ["conv"]}, "layer_types must be a list of 3 kinds, got ['conv']"),
        ({"layer_types": ["conv", "mamba", "conv"]}, "layer_types: 'mamba' is not supported"),
        ({"layer_types": ["conv"] * 3}, "full_attn_idxs [1] contradicts layer_types (= [])"),
        ({"block_ff_dim": 64}, "intermediate_size = 48 contradicts block_ff_dim (= 64)"),
        ({"tie_embedding": True}, "tie_word_embeddings = False contradicts tie_embedding (= True)"),
        ({"norm_eps": 1e-5, "rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06 contradicts norm_eps"),
        ({"block_norm_eps": 1e-6}, "block_norm_eps = 1e-06 contradicts rms_norm_eps (= 1e-05)"),
        ({"conv_dim": 64}, "conv_dim = 64 contradicts hidden_size (= 32)"),
        ({"num_heads": 8}, "num_heads = 8 contradicts num_attention_heads (= 4)"),
        ({"theta": 1e4}, "theta = 10000.0 contradicts rope_theta (= 1000000.0)"),
        ({"use_pos_enc": False}, "use_pos_enc = False is not supported, only True"),
        ({"block_use_swiglu": False}, "block_use_swiglu = False is not supported, only True"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(RAW | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_dense_layers": -1}, "num_dense_layers must be an integer from 0 on, got -1"),
        ({"num_experts": 0}, "num_experts must be a positive integer"),
        ({"use_expert_bias": 1}, "use_expert_bias must be true or false, got 1"),
    ],
)
def test_what_experts_do_not_support_is_named(change: dict[str, Any], message: str):
    raw = RAW | {"model_type": "lfm2_moe", "num_experts": 8, "num_experts_per_tok": 3}
    layers = parse_model_config(raw).layers
    assert [type(layer.mlp) for layer in layers] == [DenseConfig] * 2 + [ExpertsConfig]
    with pytest.raises(ValueError, match=message):
        parse_model_config(raw | change)


def test_channels_that_cannot_be_split_are_refused():
    shards = Shards.over(make_mesh(8), mesh_layout(make_mesh(8)))
    with pytest.raises(ValueError, match="channels of convolutions 36 cannot be split over 8"):
        short_conv_shape(ShortConvConfig(), 36, jnp.dtype(jnp.float32), shards)


def in_words_of_layers(name: str) -> str:
    for pattern, other in LFM2.renames:
        name = re.sub(pattern, other, name)
    return name


@pytest.mark.slow
def test_tensors_are_written_as_they_were_read(checkpoint, tmp_path: Path):
    """By splits, and joined on a device; with biases. Names are those of our layers."""
    directory, _, _ = checkpoint("lfm2-biases")
    model, raw = load(directory), read_json(directory / "config.json")
    stored = load_file(directory / "model.safetensors")
    tensors = {in_words_of_layers(name): tensor for name, tensor in stored.items()}
    save_tree(tmp_path, model, model.mapped(splitting()), raw)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensor) for name, tensor in tensors.items())
    shapes = decoder_shapes(model.config, jnp.dtype(jnp.float32))
    joined = shapes.mapped(joining({name: jnp.asarray(x) for name, x in tensors.items()}))
    assert all(map(np.array_equal, jax.tree.leaves(joined), jax.tree.leaves(model)))


def test_the_floor_of_short_convolutions():
    """Of each its last two inputs, in float32, are read and written."""
    target = random_target(parse_model_config(RAW))
    plain = SpeculationConfig.chain(0)
    params = EngineParams(target=target, drafter=NoDrafter(), speculation=plain)
    found = floor_bytes(params, batch=5, context=100)
    assert found.target_state == 5 * 2 * (2 * 2 * 32 * 4)
    assert found.target_kv == 5 * 100 * 1 * 2 * 2 * 8 * 4
