"""Qwen3-Next and Qwen 3.5: their checkpoints in all forms, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.mtp import load_mtp_head
from jaxspec.checkpoints.safetensors_io import load_decoder, save_tree
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.linear import Linear
from jaxspec.models.tensors import joining, splitting
from jaxspec.quantize.scoring import score
from tests.helpers.checkpoints import add_mtp_layer, hf_logits
from tests.helpers.hybrid_checkpoints import contents, save_with_images
from tests.helpers.marks import LEFT_OUT, slow
from tests.helpers.parity import load
from tests.helpers.quantized_checkpoints import FORMATS, quantize_checkpoint


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", slow("qwen3_5_text-tied")])
@pytest.mark.filterwarnings(LEFT_OUT)
def test_the_text_model_of_text_and_images_is_read(checkpoint, name: str, tmp_path: Path):
    """With fused experts, and an MTP layer beside it."""
    plain, tokens, expected = checkpoint(name)
    for path in (plain / "config.json", plain / "model.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = add_mtp_layer(tmp_path, "qwen")
    whole = save_with_images(tmp_path / "whole", text)
    np.testing.assert_allclose(hf_logits(whole, tokens), expected, rtol=0, atol=1e-6)
    assert load_model_config(whole) == load_model_config(text)
    with pytest.warns(UserWarning, match=r"1 tensors are left out.*: model\.visual\.\*$"):
        ours, theirs = load(whole), load(plain)
    assert all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs)))
    heads = [load_mtp_head(path, ours.config, jnp.dtype(jnp.float32)) for path in (whole, text)]
    assert all(map(np.array_equal, *map(jax.tree.leaves, heads)))


def raw_config(checkpoint, name: str = "qwen3_5_text") -> dict[str, Any]:
    return json.loads((checkpoint(name)[0] / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported, only True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True is not"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers must be a number of layers"),
        (
            {"num_nextn_predict_layers": 2},
            "num_nextn_predict_layers is 2, and mtp_num_hidden_layers 1",
        ),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads must be a positive integer, got 0"),
        ({"linear_conv_kernel_dim": 1}, "taps must be at least 2, got 1"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 4 kinds"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: 'mamba' is not supported"),
        ({"full_attention_interval": "x"}, "full_attention_interval must be a positive integer"),
        ({"sliding_window": 8}, "sliding_window = 8 is not supported"),
    ],
)
def test_unsupported_configs_are_named(checkpoint, change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        parse_model_config(raw_config(checkpoint) | change)


def test_the_whole_models_word_on_tied_embeddings_counts(checkpoint):
    raw = {"model_type": "qwen3_5", "text_config": raw_config(checkpoint)}
    assert not raw["text_config"]["tie_word_embeddings"]
    assert parse_model_config(raw | {"tie_word_embeddings": True}).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config must be an object, got None"),
        ({"text_config": {"model_type": "x"}}, "text_config: model_type 'x' is not supported"),
        ({"pruned_heads": 1}, "pruned_heads = 1 is not supported"),
    ],
)
def test_what_is_around_a_text_config_is_checked(checkpoint, change: dict[str, Any], message: str):
    raw = {"model_type": "qwen3_5", "text_config": raw_config(checkpoint)}
    assert parse_model_config(raw) == parse_model_config(raw["text_config"])
    with pytest.raises(ValueError, match=message):
        parse_model_config(raw | change)


def test_every_fourth_layer_has_attention(checkpoint):
    raw = raw_config(checkpoint, "qwen3_next")
    del raw["layer_types"]
    kinds = [type(layer.mixer) for layer in parse_model_config(raw).layers]
    assert kinds == [GatedDeltaConfig] * 3 + [AttentionConfig]
    raw |= {"full_attention_interval": 2}
    kinds = [type(layer.mixer) for layer in parse_model_config(raw).layers]
    assert kinds == [GatedDeltaConfig, AttentionConfig] * 2


def test_weights_that_are_no_matrices_stay_float32(checkpoint):
    directory, _, _ = checkpoint("qwen3_5_text")
    model = load_decoder(directory, load_model_config(directory), jnp.dtype(jnp.bfloat16))
    mixer: Any = model.layers[0].mixer
    assert mixer.qkvz.dtype == jnp.bfloat16 == mixer.taps.dtype
    own = mixer.a_log, mixer.dt_bias, mixer.norm
    assert {one.dtype for one in own} == {jnp.dtype(jnp.float32)}


def test_tensors_are_written_as_they_were_read(checkpoint, tmp_path: Path):
    """By splits, and joined on a device."""
    directory, _, _ = checkpoint("qwen3_5_text")
    model, (tensors, raw) = load(directory), contents(directory)
    save_tree(tmp_path, model, model.mapped(splitting()), raw)
    written, _ = contents(tmp_path)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(written[name], tensor, rtol=0, atol=1e-6)
    shapes = decoder_shapes(model.config, jnp.dtype(jnp.float32))
    joined = shapes.mapped(joining({name: jnp.asarray(x) for name, x in tensors.items()}))
    assert all(map(np.array_equal, jax.tree.leaves(joined), jax.tree.leaves(model)))


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
def test_texts_are_scored_layer_by_layer(checkpoint, tmp_path: Path):
    """By jaxspec measure-perplexity, with fused experts and an MTP layer in the checkpoint."""
    plain, tokens, logits = checkpoint("qwen3_5_moe_text")
    for path in (plain / "config.json", plain / "model.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = save_with_images(tmp_path / "whole", add_mtp_layer(tmp_path, "qwen"))
    found = score(whole, tokens, np.ones(tokens.shape, bool), batch=2)
    chances = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
    expected = -np.take_along_axis(chances, tokens[:, 1:, None], axis=-1).sum((1, 2))
    np.testing.assert_allclose(found.nats, expected, rtol=1e-4)


@pytest.mark.parametrize("form", ["compressed", slow("gptq act-order"), slow("float8")])
def test_quantized_checkpoints_are_read(checkpoint, form: str, tmp_path: Path):
    """Of what makes up a projection of ours all is quantized, or nothing."""
    directory, _, _ = checkpoint("qwen3_5_text")
    ends = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "out_proj.weight")
    own = (*ends, "in_proj_qkv.weight", "in_proj_z.weight")
    quantized, dense = quantize_checkpoint(
        directory, tmp_path, FORMATS[form], lambda name: name.endswith(own)
    )
    model, meant = load(quantized), load(dense)
    ours: list[Any] = [layer.mixer for layer in model.layers[:2]]
    theirs: list[Any] = [layer.mixer for layer in meant.layers[:2]]
    assert isinstance(ours[0].ba, Linear)
    for layer, name in ((0, "qkvz"), (0, "o"), (1, "qkv"), (1, "o")):
        own, other = (getattr(mixers[layer], name) for mixers in (ours, theirs))
        assert not isinstance(own, Linear)
        weights = (one.dense(jnp.dtype(jnp.float32)) for one in (own, other))
        np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)
