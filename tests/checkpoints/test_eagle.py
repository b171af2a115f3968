"""Loading and saving EAGLE heads in the official layout; errors for heads that do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints import load as loading
from jaxspec.checkpoints.eagle import load_eagle_head, save_eagle_head
from jaxspec.config.model import ModelConfig, dense_model
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.from_config.model import load_model_config, read_json
from jaxspec.models.heads import DraftHead, Eagle3Front
from jaxspec.models.mixers import Attention
from jaxspec.parallel import MODEL_AXIS, WHOLE, make_mesh
from tests.helpers.checkpoints import (
    DATA,
    changed_copy,
    save_tensors,
    tiny_eagle1_head,
    tiny_eagle3_head,
    tiny_llama,
)

GOLDEN_TARGET = dense_model(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position=512,
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> ModelConfig:
    return load_model_config(target_dir)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory, target_dir: Path) -> Path:
    return tiny_eagle3_head(tmp_path_factory.mktemp("eagle3"), target_dir)


@pytest.fixture(scope="module")
def eagle1(tmp_path_factory, target_dir: Path) -> Path:
    return tiny_eagle1_head(tmp_path_factory.mktemp("eagle1"), target_dir)


def load(directory: Path, target: ModelConfig, dtype: Any = jnp.float32, **more: Any) -> DraftHead:
    return load_eagle_head(directory, target, dtype, **more)


def assert_heads_equal(ours: DraftHead, theirs: DraftHead) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_golden_eagle3_head():
    head = load(DATA / "eagle3_tree", GOLDEN_TARGET)
    tensors = load_file(DATA / "eagle3_tree" / "model.safetensors")
    assert (head.method, head.capture, len(head.layers)) == ("eagle3", (2, 6, 9), 1)
    front, mixer = head.front, head.layers[0].mixer
    assert isinstance(mixer, Attention)
    qkv = mixer.qkv.weight
    assert isinstance(front, Eagle3Front)
    assert head.embed is None and front.fc.bias is None
    assert head.lm_head is not None and head.layers[0].input_norm is not None
    np.testing.assert_array_equal(front.fc.weight, tensors["fc.weight"].T)
    np.testing.assert_array_equal(head.lm_head.weight, tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(front.hidden_norm, tensors["midlayer.hidden_norm.weight"])
    np.testing.assert_array_equal(head.token_ids, np.arange(96) + tensors["d2t"])
    assert qkv.shape == (128, 2, 4, 16)
    queries = tensors["midlayer.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(qkv[:, 1, 1], queries[48:].T)


def test_the_golden_eagle1_head():
    head = load(DATA / "eagle1_tree", GOLDEN_TARGET)
    tensors = load_file(DATA / "eagle1_tree" / "model.safetensors")
    assert (head.method, head.capture) == ("eagle1", (FINAL_NORM,))
    assert (head.lm_head, head.norm, head.token_ids) == (None,) * 3
    assert head.layers[0].input_norm is None
    np.testing.assert_array_equal(head.embed, tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(head.front.fc.weight, tensors["fc.weight"].T)
    np.testing.assert_array_equal(head.front.fc.bias, tensors["fc.bias"])


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_round_trip(kind: str, target: ModelConfig, tmp_path: Path, request):
    original = request.getfixturevalue(kind)
    head = load(original, target)
    save_eagle_head(head, tmp_path, target)
    assert_heads_equal(load(tmp_path, target), head)
    theirs, ours = (load_file(d / "model.safetensors") for d in (original, tmp_path))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[name], tensor)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == read_json(original / "config.json")["architectures"]
    assert config.get("draft_vocab_size") == (96 if kind == "eagle3" else None)


def test_round_trip_of_uncommon_heads(eagle3: Path, target: ModelConfig, tmp_path: Path):
    rng = np.random.default_rng(0)
    weights = {
        "embed_tokens.weight": rng.standard_normal((320, 64), np.float32),
        "fc.bias": rng.standard_normal(64, np.float32),
        "fc.weight": rng.standard_normal((64, 128), np.float32),
        "lm_head.weight": rng.standard_normal((320, 64), np.float32),
        "midlayer.self_attn.q_proj.bias": rng.standard_normal(64, np.float32),
        "midlayer.self_attn.k_proj.bias": rng.standard_normal(32, np.float32),
        "midlayer.self_attn.v_proj.bias": rng.standard_normal(32, np.float32),
    }
    extra = {
        "draft_vocab_size": None,
        "qkv_bias": True,
        "eagle_aux_hidden_state_layer_ids": [3, 8],
        "layer_types": ["sliding_attention"],
        "sliding_window": 64,
    }
    directory = changed_copy(eagle3, tmp_path / "in", extra, d2t=None, t2d=None, **weights)
    head = load(directory, target, jnp.bfloat16)
    assert (head.capture, head.token_ids) == ((3, 8), None)
    assert head.config.layers[0].attention.window == 64
    assert head.embed is not None and head.front.fc.bias is not None
    save_eagle_head(head, tmp_path / "out", target)
    assert_heads_equal(load(tmp_path / "out", target, jnp.bfloat16), head)


def test_a_d2t_of_zeros_may_mean_the_first_ids(eagle3: Path, target: ModelConfig, tmp_path: Path):
    first = {"d2t": np.zeros(96, np.int64), "t2d": np.arange(320) < 96}
    head = load(changed_copy(eagle3, tmp_path, **first), target)
    np.testing.assert_array_equal(head.token_ids, np.arange(96))


@pytest.mark.parametrize("marks", [False, True])
def test_a_d2t_of_zeros_over_the_whole_vocabulary_says_nothing(
    marks: bool, eagle3: Path, target: ModelConfig, tmp_path: Path
):
    whole = {
        "d2t": np.zeros(320, np.int64),
        "t2d": np.full(320, marks),
        "lm_head.weight": np.ones((320, 64), np.float32),
    }
    directory = changed_copy(eagle3, tmp_path, {"draft_vocab_size": 320}, **whole)
    assert load(directory, target).token_ids is None
    whole["t2d"][:100] = not marks
    some = changed_copy(eagle3, tmp_path / "some", {"draft_vocab_size": 320}, **whole)
    with pytest.raises(ValueError, match=r"t2d marks \d+ of 320 target ids, but the head"):
        load(some, target)


def test_a_head_of_the_speculators_library(eagle3: Path, target: ModelConfig, tmp_path: Path):
    tensors = load_file(eagle3 / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    flat = read_json(eagle3 / "config.json")
    inside = {key: value for key, value in flat.items() if key != "draft_vocab_size"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 96,
        "norm_before_residual": False,
        "transformer_layer_config": inside,
    }
    assert_heads_equal(load(save_tensors(tmp_path, renamed, config), target), load(eagle3, target))


# Files as publishers write them: other fields, and what they call the tensors.
SPELLINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "SpecForge, DeepSeek-V3": (
        {"eos_token_id": 151645, "eagle_config": {"use_aux_hidden_state": True}}, None,
    ),
    "SpecForge, Qwen3-Next": ({"decoder_sparse_step": 1, "use_sliding_window": False}, None),
    "SpecForge, Phi-4": ({"model_type": "phi3", "attention_bias": False}, None),
    "AngelSlim, Qwen2.5-VL": (
        {"architectures": ["Eagle3LlamaForCausalLM"], "modal_type": "VLM",
         "target_model_type": "qwen2_5_vl", "image_token_id": 151655,
         "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, None,
    ),
    "EAGLE, Vicuna: layers of the target": ({"num_hidden_layers": 40}, None),
    "nebius, gpt-oss": (
        {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": 96}, None,
    ),
    "gpt-oss' biases, which no head has": ({"attention_bias": True, "mlp_bias": True}, None),
    "with the prefix of a model": ({}, lambda name: f"model.{name}"),
    "vLLM": (
        {"architectures": ["Eagle3Qwen3vlForCausalLM"]},
        lambda name: name.replace("midlayer.", "layers.0."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings_of_publishers(case: str, eagle3: Path, target: ModelConfig, tmp_path: Path):
    fields, rename = SPELLINGS[case]
    tensors = load_file(eagle3 / "model.safetensors")
    renamed = {rename(name) if rename else name: value for name, value in tensors.items()}
    config = read_json(eagle3 / "config.json") | fields
    assert_heads_equal(load(save_tensors(tmp_path, renamed, config), target), load(eagle3, target))


def test_biases_and_norms_are_those_of_the_tensors(
    eagle3: Path, target: ModelConfig, tmp_path: Path
):
    names = [f"midlayer.self_attn.{name}" for name in ("q_norm.weight", "k_norm.weight")]
    stored: dict[str, Any] = {name: np.full(16, 2, np.float32) for name in names}
    stored |= {
        f"midlayer.self_attn.{name}_proj.bias": np.ones(size, np.float32)
        for name, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64))
    }
    mixer = load(changed_copy(eagle3, tmp_path, **stored), target).layers[0].mixer
    assert isinstance(mixer, Attention)
    np.testing.assert_array_equal(mixer.q_norm, stored[names[0]])
    assert mixer.qkv.bias is not None and mixer.o.bias is not None


def test_a_head_without_an_lm_head_reads_the_targets(
    eagle3: Path, target: ModelConfig, tmp_path: Path
):
    """As NVIDIA's heads for gpt-oss."""
    none = {"lm_head.weight": None, "d2t": None, "t2d": None}
    head = load(changed_copy(eagle3, tmp_path / "in", {"draft_vocab_size": None}, **none), target)
    assert head.lm_head is None and head.token_ids is None
    save_eagle_head(head, tmp_path / "out", target)
    assert_heads_equal(load(tmp_path / "out", target), head)


def test_a_tree_wider_than_the_draft_vocabulary(target_dir: Path, eagle3: Path):
    wide = SpeculationConfig(num_nodes=98, max_depth=1, top_k=97)
    with pytest.raises(ValueError, match="top_k 97 is wider than the draft vocabulary of 96 tok"):
        loading.load(target_dir, eagle3, speculation=wide)


def test_a_tokenizer_of_another_make_is_named(target_dir: Path, tmp_path: Path):
    draft = shutil.copytree(target_dir, tmp_path / "draft")
    (draft / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: model.vocab must be an object"):
        loading.load(target_dir, draft)


def test_errors_say_that_the_draft_models_config_is_meant(target_dir: Path, tmp_path: Path):
    draft = shutil.copytree(target_dir, tmp_path / "draft")
    config = read_json(draft / "config.json") | {"num_attention_heads": 0}
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^draft model's .*: num_attention_heads must be"):
        loading.load(target_dir, draft)
    with pytest.raises(ValueError, match=r"^target's .*: num_attention_heads must be"):
        loading.load(draft, "none")


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_on_a_mesh(kind: str, target: ModelConfig, request):
    directory = request.getfixturevalue(kind)
    mesh, whole = make_mesh(tensor_parallel=2, data_parallel=2), load(directory, target)
    replicated = load(directory, target, mesh=mesh)
    assert replicated.layout.heads == ()
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(replicated))
    assert_heads_equal(replicated.replace(layout=WHOLE), whole)
    sharded = load(directory, target, mesh=mesh, sharded=True)
    assert sharded.layout.heads == (MODEL_AXIS,)
    mixer = sharded.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.qkv.weight.addressable_shards[0].data.shape[1] == 1
    for ours, theirs in zip(jax.tree.leaves(sharded), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_draft_vocabulary_that_devices_cannot_share(target_dir, target, tmp_path: Path):
    directory = tiny_eagle3_head(tmp_path, target_dir, draft_vocab=95)
    with pytest.raises(ValueError, match="draft vocabulary 95 cannot be split over 2 devices"):
        load(directory, target, mesh=make_mesh(tensor_parallel=2), sharded=True)


WIDE = np.zeros((64, 256), np.float32)
MISFITS = {
    "another hidden size": (
        {"hidden_size": 128, "head_dim": 16}, {}, "no embed_tokens.weight, and the target's",
    ),
    "another vocabulary": ({"vocab_size": 321}, {}, "its vocab_size is 321, not 320"),
    "another number of features": (
        {}, {"fc.weight": WIDE}, r"fc.weight is \(64, 256\), but eagle3 needs \(64, 192\)",
    ),
    "no fc": ({}, {"fc.weight": None}, "is not an EAGLE head: it has no fc.weight, though"),
    "no fc, and a config that says nothing": (
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, {"fc.weight": None},
        "it has no fc.weight, though .* look like a draft head's",
    ),
    "a misread config": ({"hidden_size": 0}, {}, "^draft head's .*config.json: hidden_size must"),
    "d2t of floats": ({}, {"d2t": np.zeros(96, np.float32)}, r"d2t of \[96\] integers"),
    "a d2t that was never filled in": (
        {}, {"d2t": np.zeros(96, np.int64), "t2d": np.zeros(320, bool)},
        "d2t is all zeros, as in a table that was never filled in",
    ),
    "no LM head for a vocabulary of its own": (
        {}, {"lm_head.weight": None},
        "has no lm_head.weight, and needs one of its own: it drafts 96 of the target's 320 ids",
    ),
    "no t2d beside a d2t of zeros": (
        {}, {"d2t": np.zeros(96, np.int64), "t2d": None}, "d2t is all zeros",
    ),
    "no d2t": ({}, {"d2t": None}, "needs a tensor d2t"),
    "ids out of range": ({}, {"d2t": np.full(96, 300)}, "does not map to distinct target ids"),
    "another t2d": ({}, {"t2d": np.zeros(320, bool)}, "t2d does not mark"),
    "another method": (
        {}, {"midlayer.hidden_norm.weight": None}, "the config says EAGLE-3",
    ),
    "fc_norm without its tensors": (
        {"fc_norm": True}, {}, "says that fc_norm is on, but there is no tensor fc_norm.0.weight",
    ),
    "norm_before_fc without its tensor": (
        {"eagle_config": {"norm_before_fc": True}}, {}, "there is no tensor input_norm.weight",
    ),
    "norms before fc that the config has not": (
        {}, {"input_norm.weight": np.ones(192, np.float32)},
        "says that norm_before_fc is off, but there is a tensor input_norm.weight",
    ),
    "too few norms": (
        {"fc_norm": True},
        {f"fc_norm.{i}.weight": np.ones(64, np.float32) for i in (0, 1)},
        "fc_norm.2.weight is missing$",
    ),
    "parallel drafting": (
        {}, {"mask_hidden": np.ones((1, 1, 192), np.float32)},
        "config.json does not say which token stands for one that is not known",
    ),
    "a missing tensor": (
        {}, {"midlayer.mlp.up_proj.weight": None}, "json: midlayer.mlp.up_proj.weight is missing$",
    ),
    "a surplus tensor": ({}, {"fc_norm.weight": np.ones(3)}, "fc_norm.weight is not part"),
    "a bias the config has not": (
        {"bias": False}, {"fc.bias": np.ones(64, np.float32)}, "fc.bias is not part",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_heads_that_do_not_fit(case: str, eagle3: Path, target: ModelConfig, tmp_path: Path):
    config, tensors, message = MISFITS[case]
    with pytest.raises(ValueError, match=message):
        load(changed_copy(eagle3, tmp_path, config, **tensors), target)


def test_an_eagle1_head_of_another_hidden_size(eagle1: Path, tmp_path: Path):
    wide = load_model_config(tiny_llama(tmp_path, hidden_size=128))
    with pytest.raises(ValueError, match="its hidden_size is 64, the target's is 128"):
        load(eagle1, wide)


def test_a_language_model_is_not_a_head(target_dir: Path, target: ModelConfig):
    with pytest.raises(ValueError, match=r"is not an EAGLE head: it has no fc\.weight"):
        load(target_dir, target)
