"""Falcon-H1: two mixers side by side, what its multipliers become, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.mixers import AttentionConfig, SideBySideConfig
from jaxspec.config.model import draft_layers
from jaxspec.config.recurrent import Mamba2Config
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.tensors import One, joining, splitting
from jaxspec.models.wrapped_tensors import scaled
from tests.helpers.parity import load
from tests.helpers.random_models import random_target

RAW: dict[str, Any] = {
    "model_type": "falcon_h1",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "eos_token_id": None,
}
# Powers of two, so that what is written is what was read.
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.25,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.125,
    "ssm_multipliers": [0.5, 1.0, 2.0, 4.0, 8.0],
    "mlp_multipliers": [0.25, 0.5],
}


def test_multipliers_are_numbers_of_the_model_or_of_projections():
    model = parse_model_config(RAW | MULTIPLIERS)
    [layer] = model.layers
    assert (model.embed_scale, model.logit_divisor) == (4, 4)
    assert isinstance(layer.mixer, SideBySideConfig)
    mamba, attention = layer.mixers
    assert isinstance(mamba, Mamba2Config) and isinstance(attention, AttentionConfig)
    assert mamba.multipliers == (1, 2, 4, 8, 16) and mamba.out_multiplier == 0.125
    assert (mamba.head_dim, mamba.norm) == (8, None)
    assert attention.scale == 0.5 * 2**2 * 8**-0.5 and attention.out_multiplier == 0.5
    plain = parse_model_config(RAW).layers[0].mixers[1]
    assert plain == AttentionConfig(4, 2, attention.rope)


def test_norms_are_before_or_after_the_gate():
    norms = [
        parse_model_config(RAW | {"mamba_rms_norm": True, "mamba_norm_before_gate": first})
        .layers[0]
        .mixers[0]
        for first in (True, False)
    ]
    assert [mixer.norm for mixer in norms if isinstance(mixer, Mamba2Config)] == [
        "before gate",
        "after gate",
    ]


def test_heads_draft_with_the_sizes_of_its_attention():
    [layer] = draft_layers(parse_model_config(RAW)).layers
    assert layer.attention.num_heads == 4 and layer.mlp is not None


def test_what_is_written_is_what_was_read(tmp_path: Path):
    """Products are divided again; in files, and of tensors on a device."""
    raw = RAW | MULTIPLIERS
    model = random_target(parse_model_config(raw))
    save_tree(tmp_path, model, model.mapped(splitting()), raw)
    tensors = load_file(tmp_path / "model.safetensors")
    [layer] = model.layers
    mixer: Any = layer.mixer
    out = np.asarray(mixer.second.o.weight).T
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.o_proj.weight"], out * 2)
    steps = np.asarray(mixer.first.cbxzt.weight)[..., -3:].reshape(32, 6).T
    np.testing.assert_array_equal(tensors["model.layers.0.mamba.in_proj.weight"][-6:], steps / 16)
    again = load(tmp_path)
    joined = decoder_shapes(model.config, jnp.dtype(jnp.float32)).mapped(
        joining({name: jnp.asarray(x) for name, x in tensors.items()})
    )
    for other in (again, joined):
        jax.tree.map(np.testing.assert_array_equal, other, model)


def test_packed_projections_are_not_multiplied():
    split = scaled(One("model.layers.0.self_attn.o_proj"), 2.0).split("values")
    with pytest.raises(ValueError, match=r"o_proj\.values is quantized, and the config has mult"):
        split(np.zeros((2, 2), np.uint8), (0, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mamba_d_ssm": 50}, "mamba_d_ssm (50) must be a multiple of mamba_n_heads (6)"),
        ({"mamba_d_head": 16}, "mamba_d_head = 16 contradicts mamba_d_ssm / mamba_n_heads (= 8)"),
        ({"mamba_d_ssm": None}, "mamba_expand * hidden_size (64) must be a multiple of mamba_n"),
        ({"mamba_d_ssm": 0}, "mamba_d_ssm must be a positive integer, got 0"),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers must be a list of 2 numbers above 0, got"),
        ({"ssm_multipliers": [1, 1, 1, 1, 0]}, "ssm_multipliers must be a list of 5 numbers above"),
        ({"key_multiplier": None}, "key_multiplier must be a number above 0, got None"),
        ({"projectors_bias": True}, "projectors_bias and mamba_proj_bias must be equal"),
        (
            {"mamba_proj_bias": True, "projectors_bias": True, "ssm_in_multiplier": 2.0},
            "mamba_proj_bias is supported with ssm_in_multiplier 1 only",
        ),
        (
            {"attention_bias": True, "attention_in_multiplier": 2.0},
            "attention_bias is supported with attention_in_multiplier 1 only",
        ),
        ({"mamba_rms_norm": 1}, "mamba_rms_norm must be true or false, got 1"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit = [0.0, 1.0] is not supported"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp = False is not supported, only True"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(json.loads(json.dumps(RAW | change)))
    assert message in str(caught.value) and "\n" not in str(caught.value)
