"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.routed import under_either_name, with_experts
from jaxspec.models.hf_keys import Family, words
from jaxspec.models.hf_values import is_integer, shown

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    words(
        """attention_bias use_sliding_window sliding_window max_window_layers num_experts
        num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        decoder_sparse_step mlp_only_layers"""
    ),
    MappingProxyType(
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "eos_token_id": None,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "layer_types": None,
            "num_experts": None,
            "num_local_experts": None,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        }
    ),
)


def finish(model: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """The model with its experts.

    Raises ValueError for a bad list of layers.
    """
    routing = RoutingConfig(
        under_either_name(hf, "num_experts", "num_local_experts", 128),
        hf["num_experts_per_tok"],
        normalize=hf["norm_topk_prob"],
    )
    experts = ExpertsConfig(hf["moe_intermediate_size"], routing)
    dense = _dense_layers(hf)
    step = hf["decoder_sparse_step"]
    return with_experts(model, experts, lambda i: i not in dense and (i + 1) % step == 0)


def _dense_layers(hf: Mapping[str, Any]) -> list[int]:
    dense = hf["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(map(is_integer, dense)):
        raise ValueError(f"mlp_only_layers must be a list of integers, got {shown(dense)}")
    return dense
