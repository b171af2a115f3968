"""GLM-4.5 and 4.6: experts chosen as DeepSeek-V3's are, grouped KV heads, partial rotary."""

import dataclasses

from jaxspec.config.model import ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.routed import after_dense, model_with_experts, sigmoid_experts
from jaxspec.models.json.keys import words


def _read(hf: Keys) -> ModelConfig:
    attention = dataclasses.replace(
        attention_of(hf, rope_of(hf)), qkv_bias=hf["attention_bias"], qk_norm=hf["use_qk_norm"]
    )
    return model_with_experts(hf, attention, sigmoid_experts(hf, 128), after_dense(hf))


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    _read,
    keys=words(
        """attention_bias partial_rotary_factor use_qk_norm n_routed_experts num_local_experts
        n_shared_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        routed_scaling_factor n_group topk_group first_k_dense_replace"""
    ),
    defaults={
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
        "num_nextn_predict_layers": 1,
    },
)
