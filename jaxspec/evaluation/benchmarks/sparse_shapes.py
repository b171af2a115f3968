"""Shapes of models whose layers attend to entries of spans, or to pools that an indexer chooses."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# What the configs do not say are the families' defaults.
_DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, 4, *[128, 4] * 20, 0],  # the last one: the MTP layer's
}
_GLM_5_NEXT = {  # the text_config of GLM-5.3-Flash
    "model_type": "glm5_next_text",
    "n_routed_experts": 288,
    "index_kpool": 4,
    "layer_types": [
        "deepseek_sparse_attention" if index % 4 == 3 else "linear_attention" for index in range(45)
    ],
    "indexer_types": ["full"] * 45,
    "num_nextn_predict_layers": 1,
}
_TINY = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "q_lora_rank": 32,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 16,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "num_nextn_predict_layers": 1,
}
# The contents of config.json, by the shape's name. The last two are for smoke tests on a CPU.
SPARSE_SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek-v4-flash": _DEEPSEEK_V4,
        "glm-5-next": _GLM_5_NEXT,
        "tiny-deepseek-v4": {
            **_TINY,
            "model_type": "deepseek_v4",
            "num_attention_heads": 8,
            "head_dim": 16,
            "qk_rope_head_dim": 8,
            "o_groups": 2,
            "o_lora_rank": 16,
            "sliding_window": 16,
            "layer_types": [
                *("sliding_attention", "compressed_sparse_attention"),
                *("heavily_compressed_attention", "compressed_sparse_attention"),
            ],
            "compress_rate_csa": 4,
            "compress_rate_hca": 32,
            "num_hash_layers": 1,
        },
        "tiny-glm-5-next": {
            **_TINY,
            "model_type": "glm5_next_text",
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_kpool": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "layer_types": [
                *("linear_attention", "deepseek_sparse_attention"),
                *("deepseek_sparse_attention", "linear_attention"),
            ],
            "indexer_types": ["full", "full", "shared", "full"],
            "first_k_dense_replace": 1,
        },
    }
)
