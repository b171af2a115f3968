"""Tensors of families that name or store them otherwise than Llama: written, read and joined."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import load_decoder, save_tree
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.tensors import joining, splitting
from tests.helpers import mtp_families
from tests.helpers.random_models import random_arrays

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
BLOCK = "model.layers.0."
SHAPES = {
    "gemma3_text": {
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "pre_feedforward_layernorm": (32,),
        "post_feedforward_layernorm": (32,),
        "self_attn.q_norm": (8,),
    },
    "phi3": {"self_attn.qkv_proj": (64, 32), "mlp.gate_up_proj": (96, 32)},
    "olmo2": {
        "post_attention_layernorm": (32,),
        "post_feedforward_layernorm": (32,),
        "self_attn.q_norm": (32,),
        "self_attn.k_norm": (16,),
    },
    # Keys and values of a head are parts of one tensor.
    "deepseek_v3": {"self_attn.kv_b_proj": (112, 40), "self_attn.q_b_proj": (96, 24)},
}
CHANGES = {"deepseek_v3": mtp_families.CONFIGS["deepseek_v3"]}


@pytest.mark.parametrize("family", SHAPES)
def test_tensors_make_the_model_that_they_were_made_of(family: str, tmp_path: Path):
    raw = SMALL | {"model_type": family} | CHANGES.get(family, {})
    config = parse_model_config(raw)
    shapes = decoder_shapes(config, jnp.dtype(jnp.float32))
    model: Decoder = random_arrays(shapes, 0)
    save_tree(tmp_path, model, model.mapped(splitting()), raw)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, shape in SHAPES[family].items():
        assert tensors[f"{BLOCK}{name}.weight"].shape == shape
    loaded = load_decoder(tmp_path, load_model_config(tmp_path), jnp.dtype(jnp.float32))
    joined = shapes.mapped(joining(jax.tree.map(jnp.asarray, tensors)))
    for found in (loaded, joined):
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert model.norm is not None
    offset = float(model.norm[0] - tensors["model.norm.weight"][0])
    assert offset == pytest.approx(config.norm_offset, abs=1e-6)


def test_surplus_tensors_are_named_as_their_file_names_them(tmp_path: Path):
    raw = SMALL | {"model_type": "phi3"}
    shapes = decoder_shapes(
        parse_model_config(raw | {"num_hidden_layers": 2}), jnp.dtype(jnp.float32)
    )
    model: Decoder = random_arrays(shapes, 0)
    save_tree(tmp_path, model, model.mapped(splitting()), raw)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as caught:
        load_decoder(tmp_path, load_model_config(tmp_path), jnp.dtype(jnp.float32))
    assert str(caught.value).count("model.layers.1.self_attn.qkv_proj.weight is not part") == 1
    assert "q_proj.weight" not in str(caught.value)
