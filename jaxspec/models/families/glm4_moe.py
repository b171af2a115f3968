"""GLM-4.5 and 4.6: experts chosen as DeepSeek-V3's are, grouped KV heads, partial rotary."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.routed import under_either_name, with_experts
from jaxspec.models.hf_keys import Family, words
from jaxspec.models.hf_values import is_integer, is_positive_number, shown

FAMILY = Family(
    "Glm4MoeForCausalLM",
    words(
        """attention_bias partial_rotary_factor use_qk_norm n_routed_experts num_local_experts
        n_shared_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        routed_scaling_factor n_group topk_group first_k_dense_replace num_nextn_predict_layers
        num_mtp_layers"""
    ),
    MappingProxyType(
        {
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "eos_token_id": None,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "n_routed_experts": None,
            "num_local_experts": None,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": None,
            "num_mtp_layers": None,
        }
    ),
)


def finish(model: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """The model with its experts. Layers for MTP, after the model's own, are not part of it.

    Raises ValueError for values of a wrong type.
    """
    scale, first = hf["routed_scaling_factor"], hf["first_k_dense_replace"]
    if not is_positive_number(scale):
        raise ValueError(f"routed_scaling_factor must be a number above 0, got {shown(scale)}")
    if not is_integer(first):
        raise ValueError(f"first_k_dense_replace must be an integer, got {shown(first)}")
    width = hf["moe_intermediate_size"]
    routing = RoutingConfig(
        under_either_name(hf, "n_routed_experts", "num_local_experts", 128),
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=hf["norm_topk_prob"],
        scale=float(scale),
        num_groups=hf["n_group"],
        top_groups=hf["topk_group"],
        correction=True,
    )
    experts = ExpertsConfig(width, routing, shared_size=hf["n_shared_experts"] * width)
    return with_experts(model, experts, lambda index: index >= first)
