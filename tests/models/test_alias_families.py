"""Families whose layers are those of others: what is rewritten in their files, and what is refused.

test_parity.py compares their logits with those of transformers.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.checkpoint_files import scan
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.rope import QueryScaling, RopeConfig
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.json.values import read_json
from jaxspec.models.rope import query_factors
from jaxspec.models.tensors import joining, splitting
from jaxspec.quantize.checkpoint import Checkpoint
from tests.helpers.alias_checkpoints import YARN, raw_config
from tests.helpers.checkpoints import changed_copy
from tests.helpers.marks import LEFT_OUT
from tests.helpers.parity import load
from tests.helpers.sampling_reference import plain_logits

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
NARROW_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def assert_same(ours: Any, theirs: Any) -> None:
    assert all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


@pytest.mark.filterwarnings(LEFT_OUT)
def test_fused_experts_are_read_in_both_orders(checkpoint, tmp_path: Path):
    """As Qwen3-VL is published, and as transformers 5 writes it: told by the shapes."""
    directory, _, _ = checkpoint("qwen3_vl_moe")
    tensors = load_file(directory / "model.safetensors")
    fused = {name: x for name, x in tensors.items() if x.ndim == 3 and ".experts." in name}
    assert len(fused) == 4
    turned: dict[str, Any] = {
        name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in fused.items()
    }
    assert_same(load(changed_copy(directory, tmp_path, **turned)), load(directory))


def test_old_files_have_the_keys_of_the_text_model_beside_the_others(checkpoint, tmp_path: Path):
    directory, _, _ = checkpoint("qwen2_5_vl")
    raw = read_json(directory / "config.json")
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "use_sliding_window": False}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(text | raw))
    assert load_model_config(tmp_path) == load_model_config(directory)


def test_one_warning_names_what_is_left_out(checkpoint):
    directory, _, _ = checkpoint("qwen2_5_vl")
    with pytest.warns(UserWarning) as caught:
        names = scan(directory)
    assert all(name.startswith("model.") for name in names)  # the LM head is tied
    [warning] = caught
    assert str(warning.message).endswith("left out, as texts are written without them: visual.*")


def test_models_of_text_and_images_are_not_quantized(checkpoint):
    with pytest.raises(ValueError, match="is a model of text and images, which is not quantized"):
        Checkpoint(checkpoint("qwen2_5_vl")[0])


@pytest.mark.parametrize("name", ["hunyuan", "apertus"])
def test_families_with_names_of_their_own_are_not_quantized(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config(name)))
    with pytest.raises(ValueError, match="tensors of other names than Llama's: its family is not"):
        Checkpoint(tmp_path)


def test_a_correction_that_is_missing_is_named(checkpoint, tmp_path: Path):
    """It is not taken for zeros."""
    name = "model.layers.1.block_sparse_moe.e_score_correction_bias"
    changed_copy(checkpoint("minimax_m2")[0], tmp_path, **{name: None})
    with pytest.raises(ValueError, match=f"{re.escape(name)} is missing"):
        load(tmp_path)


def test_published_files_of_axk1_have_other_tensors(checkpoint, tmp_path: Path):
    """No correction, whatever topk_method says, and a norm after dense MLPs that nothing reads."""
    directory, _, _ = checkpoint("axk1")
    tensors = load_file(directory / "model.safetensors")
    corrections = [name for name in tensors if name.endswith("e_score_correction_bias")]
    zeros: dict[str, Any] = {name: np.zeros_like(tensors[name]) for name in corrections}
    expected = load(changed_copy(directory, tmp_path / "zeros", **zeros))
    changes: dict[str, Any] = dict.fromkeys(corrections)
    changes["model.layers.0.post_mlp_layernorm.weight"] = np.full(64, 7, np.float32)
    own = {"topk_method": "noaux_tc", "model_type": "AXK1"}
    found = load(changed_copy(directory, tmp_path / "published", own, **changes))
    tokens = np.arange(24).reshape(2, 12)
    assert len(corrections) == 1
    np.testing.assert_array_equal(plain_logits(found, tokens), plain_logits(expected, tokens))


def test_two_names_of_one_tensor_are_refused(checkpoint, tmp_path: Path):
    name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    second: dict[str, Any] = {name: np.zeros(8, np.float32)}
    changed_copy(checkpoint("minimax_m2")[0], tmp_path, **second)
    with pytest.raises(ValueError, match="which are names of one tensor: remove the one that"):
        load(tmp_path)


def test_interleaved_heads_are_written_as_they_were_read(checkpoint, tmp_path: Path):
    """By splits, and joined on a device; with biases."""
    directory, _, _ = checkpoint("ernie4_5")
    model, tensors = load(directory), load_file(directory / "model.safetensors")
    save_tree(tmp_path, model, model.mapped(splitting()), read_json(directory / "config.json"))
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensor) for name, tensor in tensors.items())
    shapes = decoder_shapes(model.config, jnp.dtype(jnp.float32))
    joined = shapes.mapped(joining({name: jnp.asarray(x) for name, x in tensors.items()}))
    assert_same(joined, model)


def ropes_of(layer: Any) -> tuple[Any, ...]:
    """Of its mixer."""
    return layer.mixer.ropes


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_queries_are_scaled_by_their_position(name: str):
    raw = raw_config(name)
    config = parse_model_config(raw)
    assert config.max_position == 512
    assert {rope.query_scaling for layer in config.layers for rope in ropes_of(layer)} == {
        QueryScaling(0.5, 16)
    }
    del raw["rope_parameters"]
    [rope] = ropes_of(parse_model_config(raw).layers[0])
    assert rope.query_scaling is not None and rope.query_scaling.beta == 0.1
    raw["rope_parameters"] = YARN | {"llama_4_scaling_beta": 0}
    [rope] = ropes_of(parse_model_config(raw).layers[0])
    assert rope.query_scaling is None


def test_layers_of_llama_4_rotate_and_have_chunks_or_neither():
    layers = parse_model_config(raw_config("llama4_text")).layers
    mixers = [layer.attention for layer in layers]
    assert [mixer.chunk for mixer in mixers] == [9, 9, None, 9]
    assert [mixer.unit_qk_norm for mixer in mixers] == [True, True, False, True]
    assert [mixer.rope.rotary_dim for mixer in mixers] == [None, None, 0, None]
    assert mixers[2].rope.query_scaling == QueryScaling(0.5, 8, first=1)
    assert [isinstance(layer.mlp, ExpertsConfig) for layer in layers] == [False, True] * 2


def test_factors_of_queries_are_those_of_their_spans():
    found = query_factors(QueryScaling(0.5, 16), jnp.array([[-1, 0, 15, 16, 47, 48]]))
    expected = 1 + 0.5 * np.log(np.array([[1, 1, 1, 2, 3, 4]]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    shifted = query_factors(QueryScaling(0.5, 16, first=1), jnp.array([[-1, 0, 14, 15, 46, 47]]))
    np.testing.assert_allclose(shifted, expected, rtol=1e-6)


def test_alpha_moves_the_base_of_the_rotation():
    raw = raw_config("hunyuan") | {"head_dim": 128}
    for alpha, expected in ((1000.0, 1e4 * 1000 ** (128 / 126)), (None, 1e4)):
        raw["rope_parameters"] = DYNAMIC | {"alpha": alpha}
        attention = parse_model_config(raw).layers[0].attention
        assert attention.norm_after_rope and attention.rope == RopeConfig(128, expected)


def test_layers_without_windows_of_cohere_do_not_rotate():
    config = parse_model_config(raw_config("cohere2") | {"layer_types": None})
    layers = [layer.attention for layer in config.layers]
    assert [layer.window for layer in layers] == [7, 7, 7]
    config = parse_model_config(raw_config("cohere2"))
    layers = [layer.attention for layer in config.layers]
    assert [(layer.window, layer.rope.rotary_dim) for layer in layers] == [
        (7, None),
        (None, 0),
        (7, None),
    ]
    assert config.centred and config.logit_divisor == 4


def test_norms_of_some_layers_cannot_be_centred():
    config = parse_model_config(raw_config("cohere2"))
    first, *others = config.layers
    with pytest.raises(ValueError, match="the norms of all layers subtract the mean, or those of"):
        dataclasses.replace(config, layers=(dataclasses.replace(first, centred=False), *others))


def test_a_pattern_of_letters_says_which_layers_have_windows():
    raw = raw_config("exaone4") | {"num_hidden_layers": 8, "sliding_window_pattern": "LLLG"}
    del raw["layer_types"]
    windows = [layer.attention.window for layer in parse_model_config(raw).layers]
    assert windows == [7, 7, 7, None] * 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "ministral3",
            {"llama_4_scaling_beta": 0.1},
            "llama_4_scaling_beta = 0.1 is not supported",
        ),
        ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": -1}}, "a number from 0"),
        (
            "mistral4",
            {"rope_parameters": {"llama_4_scaling_beta": 1}},
            "unknown key 'llama_4_scali",
        ),
        ("seed_oss", {"rope_parameters": YARN}, "unknown key 'llama_4_scaling_beta' (= 0.5)"),
        ("hunyuan", {"use_cla": True}, "use_cla = True is not supported, only False"),
        ("hunyuan", {"use_qk_norm": False}, "use_qk_norm = False is not supported, only True"),
        ("hunyuan", {"rope_parameters": DYNAMIC | {"alpha": "x"}}, "alpha and rope_theta must be"),
        ("hunyuan", {"rope_parameters": DYNAMIC | {"beta": 1}}, "with alpha: unknown key 'beta'"),
        (
            "hunyuan",
            {"rope_parameters": NARROW_YARN},
            "norm_after_rope: yarn and longrope multiply",
        ),
        ("apertus", {"hidden_act": "silu"}, "hidden_act = 'silu' is not supported, only 'xielu'"),
        ("apertus", {"post_norm": True}, "post_norm = True is not supported, only False"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block = False is not supported"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm = True is not supported, only False"),
        ("cohere2", {"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06 is not supported, only None"),
        ("cohere2", {"layer_switch": 2}, "layer_switch = 2 contradicts sliding_window_pattern"),
        ("cohere2", {"logit_scale": 0}, "logit_scale must be a number above 0, got 0"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok must be 1 where inputs"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size must be a positive int"),
        ("llama4_text", {"layer_types": ["x"] * 4}, "must be a list of full_attention and chunked"),
        ("llama4_text", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 lay"),
        ("llama4_text", {"moe_layers": [4]}, "moe_layers must be a list of indices below 4, got"),
        ("llama4_text", {"no_rope_layers": [2] * 4}, "no_rope_layers must be a list of 0 and 1"),
        ("llama4_text", {"floor_scale": 0}, "floor_scale must be a positive integer, got 0"),
        ("llama4_text", {"attn_scale": 0}, "attn_scale must be a number above 0, got 0"),
        ("llama4_text", {"attn_temperature_tuning": "x"}, "must be true or false, got 'x'"),
        ("granite4", {"layer_types": ["rnn"] * 2}, "layer_types = ['rnn', 'rnn'] is not supported"),
        ("granite4", {"num_local_experts": -1}, "num_local_experts must be a positive integer"),
        ("granite4", {"position_embedding_type": "x"}, "position_embedding_type 'x' is not"),
        ("granite4", {"normalization_function": "layernorm"}, "normalization_function = 'layern"),
        ("exaone4", {"sliding_window_pattern": "LGLG"}, "sliding_window_pattern 'LGLG' is not"),
        ("exaone_moe", {"is_moe_layer": [1]}, "is_moe_layer must be a list of true and false, got"),
        ("exaone_moe", {"is_moe_layer": [True] * 3}, "is_moe_layer contradicts mlp_layer_types"),
        (
            "exaone_moe",
            {"num_nextn_predict_layers": 1, "mtp_layer_types": []},
            "mtp_layer_types must be 1 of full_attention and sliding_attention, got []",
        ),
        (
            "exaone_moe",
            {"swiglu_limits": [7.0]},
            "swiglu_limits = [7.0] is not supported, only None",
        ),
        ("mellum", {"rope_parameters": {}}, "rope_parameters must have full_attention and sliding"),
        ("mellum", {"mtp_layer_types": ["full_attention"]}, "only ['sliding_attention']"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported, only None"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act = 'silu' is not supported, only 'relu2'"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True is not supported"),
        ("ernie4_5_moe", {"moe_layer_end_index": "x"}, "moe_layer_end_index must be an integer"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list = [1, 0] is not supported"),
        ("minimax_m2", {"rotary_dim": 0}, "rotary_dim must be a positive integer, got 0"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("hy_v3", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries for 2 layers"),
        ("hy_v3", {"mlp_layer_types": "sparse"}, "mlp_layer_types must be a list of dense and sp"),
        ("qwen3_vl", {"text_config": {"model_type": "qwen3"}}, "text_config: model_type 'qwen3'"),
        ("mistral3", {"text_config": {"model_type": "llama"}}, "only 'mistral' or 'ministral3' or"),
        ("kimi_k25", {"auto_map": {"AutoModelForCausalLM": "a.B"}}, "'a.B' is not supported, only"),
    ],
)
def test_what_is_not_supported_is_named(name: str, change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(raw_config(name) | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)
