"""Configs of small random Gemma 4 models, for alias_checkpoints."""

from typing import Any

import transformers

# A text of 40 tokens is longer than the window. Full layers have wider heads, and fewer of keys.
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.15,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
DENSE = SIZES | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = DENSE | {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
# Two of each kind have keys of their own. The last layers read those of layers 2 and 3.
SMALL: dict[str, Any] = SIZES | {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2
    + ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True,
}
UNIFIED = {key: value for key, value in DENSE.items() if "per_layer_input" not in key}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
UNIFIED_VISION = {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 64}

# Layers of an assistant, which read the last layer of each kind. Their KV heads are the target's.
ASSISTANT: dict[str, Any] = {
    **SIZES,
    "model_type": "gemma4_text",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": None,
}

VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma4": (transformers.Gemma4Config, {"text_config": DENSE, "vision_config": VISION}),
    "gemma4_text": (
        transformers.Gemma4TextConfig,
        SIZES
        | {
            "attention_bias": True,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
    "gemma4-experts": (transformers.Gemma4TextConfig, EXPERTS),
    "gemma4-small": (transformers.Gemma4TextConfig, SMALL),
    "gemma4_unified": (
        transformers.Gemma4UnifiedConfig,
        {"text_config": UNIFIED, "vision_config": UNIFIED_VISION},
    ),
}
