"""Kimi Linear: what its configs say, and what is refused. test_parity.py compares its logits."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.recurrent import KimiDeltaConfig
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.tensors import joining, splitting
from tests.helpers.parity import load
from tests.helpers.random_models import random_target

RAW: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "eos_token_id": None,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
    },
}


def with_lists(**lists: Any) -> dict[str, Any]:
    return {"linear_attn_config": RAW["linear_attn_config"] | lists}


def test_layers_are_as_the_lists_say():
    model = parse_model_config(RAW)
    delta = KimiDeltaConfig(num_heads=2, head_dim=8, taps=3)
    assert [layer.mixer for layer in model.layers[::2]] == [delta] * 2
    latent = model.layers[1].mixer
    assert isinstance(latent, LatentConfig) and latent.scale == 12**-0.5
    assert latent.rope is not None
    assert latent.rope.rotary_dim == 0 and latent.rope.head_dim == 4
    assert [isinstance(layer.mlp, ExpertsConfig) for layer in model.layers] == [False, True, True]
    assert model.is_recurrent and model.max_position == 1048576


def test_names_are_those_of_files_or_of_transformers():
    newer = {name: value for name, value in RAW.items() if name != "linear_attn_config"}
    newer["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
    newer |= {"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 3}
    newer["mlp_layer_types"] = ["dense", "sparse", "sparse"]
    newer |= {"num_local_experts": newer.pop("num_experts"), "max_position_embeddings": 1048576}
    assert parse_model_config(newer) == parse_model_config(RAW)
    others = {name: value for name, value in newer.items() if name != "layer_types"}
    kinds = parse_model_config(others | {"num_hidden_layers": 5, "mlp_layer_types": None}).layers
    assert [layer.is_recurrent for layer in kinds] == [True, True, True, True, False]


@pytest.mark.slow
def test_what_is_written_is_what_was_read(tmp_path: Path):
    """Rates have the shape of files; also of tensors on a device."""
    model = random_target(parse_model_config(RAW))
    save_tree(tmp_path, model, model.mapped(splitting()), RAW)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 2, 1)
    assert tensors["model.layers.0.self_attn.q_conv1d.weight"].shape == (16, 1, 3)
    joined = decoder_shapes(model.config, jnp.dtype(jnp.float32)).mapped(
        joining({name: jnp.asarray(x) for name, x in tensors.items()})
    )
    for other in (load(tmp_path), joined):
        jax.tree.map(np.testing.assert_array_equal, other, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_lists(kda_layers=[1]), "kda_layers and full_attn_layers must have each layer from 1"),
        (with_lists(kda_layers="1"), "kda_layers and full_attn_layers must be lists"),
        (with_lists(gate_lower_bound=-5.0), "linear_attn_config: unknown key 'gate_lower_bound'"),
        (with_lists(num_heads=0), "linear_num_heads must be a positive integer, got 0"),
        (with_lists(short_conv_kernel_size=1), "taps must be at least 2, got 1"),
        ({"linear_attn_config": 3}, "linear_attn_config must be an object, got 3"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["rnn"] * 3}, "layer_types must be a list of full_attention and linear"),
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported, only True"),
        ({"moe_router_activation_func": "softmax"}, "'softmax' is not supported, only 'sigmoid'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling = {'type': 'yarn'} is not supported"),
        ({"num_local_experts": 4}, "num_local_experts = 4 contradicts num_experts (= 8)"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be a positive integer, got None"),
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1 contradicts num_attention_heads"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(json.loads(json.dumps(RAW | change)))
    assert message in str(caught.value) and "\n" not in str(caught.value)
