"""gpt-oss: experts with an activation of their own, attention sinks, alternating windows, yarn."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.experts import ClampedSwiglu, ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.routed import under_either_name
from jaxspec.models.hf_keys import Family, words
from jaxspec.models.hf_values import is_positive_number, shown

FAMILY = Family(
    "GptOssForCausalLM",
    words(
        """attention_bias sliding_window layer_types num_local_experts num_experts
        num_experts_per_tok experts_per_token swiglu_alpha swiglu_limit initial_context_length"""
    ),
    MappingProxyType(
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "eos_token_id": None,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": None,
            "num_experts": None,
            "num_experts_per_tok": None,
            "experts_per_token": None,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        }
    ),
)


def finish(model: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """The model with its experts and sinks.

    Raises ValueError for values of a wrong type.
    """
    for key in ("swiglu_alpha", "swiglu_limit"):
        if not is_positive_number(hf[key]):
            raise ValueError(f"{key} must be a number above 0, got {shown(hf[key])}")
    routing = RoutingConfig(
        under_either_name(hf, "num_local_experts", "num_experts", 128),
        under_either_name(hf, "num_experts_per_tok", "experts_per_token", 4),
        "chosen",
        bias=True,
    )
    experts = ExpertsConfig(
        hf["intermediate_size"],
        routing,
        activation=ClampedSwiglu(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"])),
        bias=True,
        names=ExpertNames(router="router"),
        fused="interleaved",
    )
    return model.map_layers(
        lambda layer: LayerConfig(dataclasses.replace(layer.mixer, sinks=True), experts)
    )
