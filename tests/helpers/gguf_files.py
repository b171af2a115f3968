"""Models written as GGUF by the rules of llama.cpp's converter.

Names and fields are those of the package gguf, which llama.cpp publishes; its converter's two
changes of values (pairs of rotations beside each other, norms plus 1) are repeated here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = ["pad", "bos", "eos", "a", "b", "ab", *(f"t{id_}" for id_ in range(6, 300))]


class Model(NamedTuple):
    """``architecture``: llama.cpp's name. ``config``: Hugging Face's keys beside TINY's."""

    architecture: str
    model_type: str
    config: Mapping[str, Any] = MappingProxyType({})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 20000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": 128,
    "rope_theta": 20000.0,
}
MODELS = {
    "llama": Model("llama", "llama", {"tie_word_embeddings": True}),
    "llama with biases": Model("llama", "llama", {"attention_bias": True}),
    "mistral": Model("llama", "mistral", {"sliding_window": 96}),
    "qwen2": Model("qwen2", "qwen2"),
    "qwen2 yarn": Model(
        "qwen2",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 20000.0,
            }
        },
    ),
    "qwen3": Model("qwen3", "qwen3", {"head_dim": 32}),
    "qwen3moe": Model(
        "qwen3moe",
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": Model(
        "gemma3",
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "rope_theta": None},
    ),
    "phi3": Model("phi3", "phi3", {"partial_rotary_factor": 0.75, "rope_parameters": LONGROPE}),
}


def hf_model(model: Model) -> Any:
    given = {name: value for name, value in {**TINY, **model.config}.items() if value is not None}
    config = transformers.AutoConfig.for_model(model.model_type, **given)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in made.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(weight)
    return made


def write_gguf(
    made: Any,
    model: Model,
    path: Path,
    kind: GGMLQuantizationType,
    others: Mapping[str, GGMLQuantizationType] = MappingProxyType({}),
) -> None:
    """``kind``: of matrices, but for those of tensors that ``others`` names."""
    config = made.config
    writer = GGUFWriter(path, model.architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "head_dim" in model.config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    share = model.config.get("partial_rotary_factor", 1)
    writer.add_rope_dimension_count(int(head_dim * share))
    if window := model.config.get("sliding_window"):
        writer.add_sliding_window(window)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("long", "short"):
            table = np.asarray(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", table)
    if "num_experts" in model.config:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    for name, values in converted(made, model):
        as_kind = others.get(name, kind)
        is_matrix = values.ndim > 1 and as_kind != GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, as_kind) if is_matrix else values
        writer.add_tensor(name, data, raw_dtype=as_kind if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(made: Any, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as llama.cpp's converter writes them."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == model.architecture)
    names = gguf.get_tensor_name_map(arch, made.config.num_hidden_layers)
    for name, weight in made.state_dict().items():
        values = weight.numpy()
        if name == "lm_head.weight" and made.config.tie_word_embeddings:
            continue
        if model.architecture == "llama" and ".q_proj" in name:
            values = paired(values, made.config.num_attention_heads)
        if model.architecture == "llama" and ".k_proj" in name:
            values = paired(values, made.config.num_key_value_heads)
        if model.architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if ".experts." in name:
            yield from experts(names, name, values)
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, np.ascontiguousarray(values)


def experts(names: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    layer = name.split(".")[2]
    if name.endswith("gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        yield f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate)
        yield f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up)
    else:
        yield f"blk.{layer}.ffn_down_exps.weight", np.ascontiguousarray(values)


def paired(values: np.ndarray, heads: int) -> np.ndarray:
    """Entries i and i + D / 2 of a head beside each other."""
    split = values.reshape(heads, 2, -1, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)
