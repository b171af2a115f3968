"""Mixtral: Mistral with experts in every layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.experts import ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.routed import with_experts
from jaxspec.models.hf_keys import Family, words

FAMILY = Family(
    "MixtralForCausalLM",
    words("sliding_window num_local_experts num_experts_per_tok"),
    MappingProxyType(
        {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    ),
)
NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def finish(model: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """The model with its experts."""
    routing = RoutingConfig(hf["num_local_experts"], hf["num_experts_per_tok"], normalize=True)
    experts = ExpertsConfig(hf["intermediate_size"], routing, names=NAMES)
    return with_experts(model, experts)
