"""Mixtral: Mistral with experts in every layer."""

from jaxspec.config.experts import ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.routed import model_with_experts
from jaxspec.models.families.windows import window_of
from jaxspec.models.json.keys import words

NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def _read(hf: Keys) -> ModelConfig:
    attention = attention_of(hf, rope_of(hf), window_of(hf["sliding_window"]))
    routing = RoutingConfig(hf["num_local_experts"], hf["num_experts_per_tok"], normalize=True)
    experts = ExpertsConfig(hf["intermediate_size"], routing, names=NAMES)
    return model_with_experts(hf, attention, experts)


MIXTRAL = Family(
    "MixtralForCausalLM",
    _read,
    keys=words("sliding_window num_local_experts num_experts_per_tok"),
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
