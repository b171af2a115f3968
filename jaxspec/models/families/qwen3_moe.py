"""Qwen3 with experts, such as Qwen3-30B-A3B."""

import dataclasses

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.routed import every_few, model_with_experts, under_either_name
from jaxspec.models.families.windows import window_of
from jaxspec.models.json.keys import words


def _read(hf: Keys) -> ModelConfig:
    # All layers have the window; max_window_layers has no effect, as in transformers.
    window = window_of(hf["sliding_window"]) if hf["use_sliding_window"] else None
    bias = hf["attention_bias"]
    attention = dataclasses.replace(
        attention_of(hf, rope_of(hf), window), qkv_bias=bias, o_bias=bias, qk_norm=True
    )
    routing = RoutingConfig(
        under_either_name(hf, "num_experts", "num_local_experts", 128),
        hf["num_experts_per_tok"],
        normalize=hf["norm_topk_prob"],
    )
    experts = ExpertsConfig(hf["moe_intermediate_size"], routing)
    return model_with_experts(hf, attention, experts, every_few(hf))


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    _read,
    keys=words(
        """attention_bias use_sliding_window sliding_window max_window_layers num_experts
        num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        decoder_sparse_step mlp_only_layers"""
    ),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "eos_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": None,
        "num_local_experts": None,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
)
