"""Configs of small random MiniMax M3 models, for alias_checkpoints."""

from typing import Any

import transformers

from tests.helpers.checkpoints import TINY

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
# A text of 40 tokens has many more blocks than are attended to. Hidden units reach the limit of the
# activation.
TEXT: dict[str, Any] = TINY | {
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 40,
    "head_dim": 32,
    "rotary_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "layer_types": [FULL, SPARSE, SPARSE],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.7,
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_block_size": 3,
    "index_topk_blocks": 4,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
}
IMAGES = {"vision_config": VISION, "projector_hidden_size": 32, "tie_word_embeddings": False}
# In the second one all layers choose, and two blocks of the latest positions are always among the
# chosen ones.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "minimax_m3": (transformers.MiniMaxM3VLConfig, {"text_config": TEXT} | IMAGES),
    "minimax_m3-local": (
        transformers.MiniMaxM3VLConfig,
        {
            "text_config": TEXT
            | {"layer_types": [SPARSE] * 3, "mlp_layer_types": ["sparse", "dense", "sparse"]}
            | {"index_block_size": 5, "index_topk_blocks": 3, "index_local_blocks": 2}
            | {"num_key_value_heads": 4, "index_n_heads": 4, "routed_scaling_factor": 1.3},
        }
        | IMAGES,
    ),
}
