"""Small random checkpoints of Qwen3-Next and Qwen 3.5, made with transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import TINY, save_random_model

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_next": (transformers.Qwen3NextConfig, EXPERTS),
    "qwen3_next-dense": (
        transformers.Qwen3NextConfig,
        EXPERTS
        | {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True}
        | {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 4, "layer_types": None},
    ),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, {"rope_parameters": ROPE}),
    "qwen3_5_text-tied": (
        transformers.Qwen3_5TextConfig,
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, EXPERTS),
}


def save_hybrid(directory: Path, name: str, **overrides: Any) -> Path:
    """A checkpoint of a variant. Norms, decays and biases are random."""
    kind, own = VARIANTS[name]
    return save_random_model(directory, kind(**TINY | HYBRID | own | overrides))
