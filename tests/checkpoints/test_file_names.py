"""Tensors that a checkpoint lacks are named as its files would name them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoints.checkpoint_files import StoredTensor
from jaxspec.checkpoints.file_names import missing_in_files, said_missing
from jaxspec.checkpoints.formats import canonical
from jaxspec.checkpoints.formats.views import part_of
from jaxspec.checkpoints.tensor_names import named
from jaxspec.models.tensors import CheckpointTensor
from tests.checkpoints.formats.test_symmetric_zeros import MODULE, compressed

# By model_type: names as published, of three layers (#) where there are several, and of two experts
# (@). The last of each are those of layer 1 alone.
PUBLISHED = {
    "deepseek_v4": """embed.weight head.weight norm.weight hc_head_base hc_head_fn hc_head_scale
        layers.#.attn_norm.weight layers.#.ffn_norm.weight layers.#.hc_attn_base
        layers.#.hc_ffn_fn layers.#.attn.attn_sink layers.#.attn.wq_a.weight
        layers.#.attn.q_norm.weight layers.#.attn.wkv.weight layers.#.attn.kv_norm.weight
        layers.#.attn.wo_b.weight layers.#.attn.compressor.wkv.weight
        layers.#.attn.compressor.wgate.weight
        layers.#.attn.compressor.ape layers.#.attn.compressor.norm.weight
        layers.#.attn.indexer.wq_b.weight layers.#.attn.indexer.weights_proj.weight
        layers.#.attn.indexer.compressor.wgate.weight
        layers.#.attn.indexer.compressor.wkv.weight layers.#.ffn.gate.weight
        layers.#.ffn.gate.bias layers.#.ffn.experts.@.w1.weight layers.#.ffn.experts.@.w2.weight
        layers.#.ffn.shared_experts.w3.weight layers.1.ffn.gate.tid2eid""",
    "kimi_linear": """model.embed_tokens.weight lm_head.weight model.norm.weight
        model.layers.#.input_layernorm.weight model.layers.#.self_attn.q_conv1d.weight
        model.layers.#.self_attn.A_log model.layers.#.block_sparse_moe.gate.weight
        model.layers.#.block_sparse_moe.gate.e_score_correction_bias
        model.layers.#.block_sparse_moe.experts.@.w1.weight
        model.layers.#.block_sparse_moe.shared_experts.up_proj.weight
        model.layers.1.self_attn.kv_b_proj.weight""",
    "lfm2_moe": """model.embed_tokens.weight model.embedding_norm.weight
        model.layers.#.operator_norm.weight model.layers.#.ffn_norm.weight
        model.layers.#.feed_forward.experts.@.w3.weight model.layers.#.feed_forward.expert_bias
        model.layers.#.conv.in_proj.weight model.layers.1.self_attn.q_layernorm.weight
        model.layers.1.self_attn.out_proj.weight""",
    "glm5_next": """model.language_model.embed_tokens.weight lm_head.weight
        model.language_model.norm.weight model.language_model.layers.#.input_layernorm.weight
        model.language_model.layers.#.mlp.experts.@.up_proj.weight
        model.language_model.layers.1.self_attn.indexer.index_kpool_compress_gate""",
    "minimax_m2": """model.norm.weight model.layers.#.self_attn.q_proj.weight
        model.layers.#.block_sparse_moe.gate.weight
        model.layers.#.block_sparse_moe.e_score_correction_bias""",
    "llama": "embed_tokens.weight norm.weight layers.#.mlp.up_proj.weight",  # a bare model
}


# DeepSeek-V4's files have two spellings of these: names of other layers tell which.
TWICE = ("hc_attn", "hc_ffn", "kv_norm")


def layers_of(folder: Path, model_type: str, names: list[str]) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint that has no more than these names, by those of the layers."""
    config: dict[str, Any] = {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    stored: dict[str, CheckpointTensor] = {
        name: StoredTensor(file, name, (1,), "F32", 0) for name in names
    }
    return named(stored, config, folder)


def spelled(template: str) -> list[str]:
    names = [template.replace("#", str(layer)) for layer in range(1 + 2 * ("#" in template))]
    experts = range(1 + ("@" in template))
    return [name.replace("@", str(expert)) for name in names for expert in experts]


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_each_name_is_the_files_own(model_type: str, tmp_path: Path):
    """Whether other layers have the tensor, or none has it."""
    templates = PUBLISHED[model_type].split()
    names = [name for template in templates for name in spelled(template)]
    stored = layers_of(tmp_path, model_type, names)
    wanted = {tensor.name: name for name, tensor in stored.items()}
    for name in names:
        rest = {key: tensor for key, tensor in stored.items() if tensor.name != name}
        assert missing_in_files([wanted[name]], rest) == {template_of(name): [name]}
    for template in templates:
        if any(name in template for name in TWICE):
            continue
        gone = spelled(template)
        rest = {key: tensor for key, tensor in stored.items() if tensor.name not in gone}
        found = missing_in_files([wanted[name] for name in gone], rest)
        assert found == {template_of(gone[0]): gone}


def template_of(name: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def test_many_that_differ_in_numbers_are_one_phrase(tmp_path: Path):
    stored = layers_of(tmp_path, "deepseek_v4", ["layers.0.ffn.experts.0.w1.weight"])
    missing = [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(9)]
    assert [*said_missing(missing[:1], stored)] == ["layers.1.ffn.experts.0.w1.weight is missing"]
    first, last = (f"layers.1.ffn.experts.{expert}.w1.weight" for expert in (0, 8))
    assert [*said_missing(missing, stored)] == [f"{first} to {last} are missing (9 tensors)"]


def test_targets_of_compressed_tensors_may_be_names_of_the_file():
    config, stored = compressed(4, None)
    tensors = {
        name: dataclasses.replace(tensor, name=name.replace(".self_attn.", ".attention."))
        for name, tensor in stored.items()
    }
    group = config["config_groups"]["group_0"]
    group["targets"] = [r"re:.*\.attention\..*"]
    assert canonical(config, tensors).keys() == {f"{MODULE}.values", f"{MODULE}.scale"}
    group["targets"] = [r"re:.*\.ffn\..*"]
    with pytest.raises(ValueError, match="no group of quantization_config says so"):
        canonical(config, tensors)


def test_what_no_rule_explains_has_the_layers_name(tmp_path: Path):
    stored = layers_of(tmp_path, "gpt2", ["wte.weight"])
    assert [*said_missing(["model.norm.weight"], stored)] == ["model.norm.weight is missing"]
    assert [*said_missing(["model.norm.weight"], {})] == ["model.norm.weight is missing"]


class Unsearched(dict[str, CheckpointTensor]):
    def items(self) -> Any:
        raise AssertionError("all tensors were looked through")


@pytest.mark.parametrize("part", ["weight", "weight_packed", "weight_scale_inv", "qweight"])
def test_a_quantized_module_is_named_without_a_search(tmp_path: Path, part: str):
    """An error looks for each module that lacks a part, and experts are tens of thousands."""
    [old] = names = [f"layers.0.ffn.experts.0.w1.{part}"]
    stored = Unsearched(layers_of(tmp_path, "deepseek_v4", names))
    [name] = stored
    module = name.removesuffix(f".{part}")
    assert module != old.removesuffix(f".{part}")
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.experts\.0\.w1\.rest is missing$"):
        part_of(stored, module, "rest")
