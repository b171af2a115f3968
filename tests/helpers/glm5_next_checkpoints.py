"""Configs of small random GLM-5-Next models, for alias_checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import load_file

from tests.helpers.checkpoints import TINY, save_tensors

# A text of 40 tokens has many more pools than are attended to. Hardly any scores are equal, as
# those without a product above 0 are: of these transformers chooses any. Padding has embeddings of
# 0.
TEXT: dict[str, Any] = TINY | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_types": ["full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "swiglu_limit": 0.3,
    "index_topk": 9,
    "index_kpool": 3,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "projection_intermediate_size": 32,
}
# Texts of the second are not longer than what is attended to.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "glm5_next": (
        transformers.Glm5NextConfig,
        {"text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False},
    ),
    "glm5_next-unbounded": (
        transformers.Glm5NextConfig,
        {
            "text_config": TEXT
            | {"linear_lower_bound": None, "attention_bias": True, "index_kpool": 4}
            | {"index_topk": 64, "hc_mult": 4, "hc_sinkhorn_iters": 20, "n_shared_experts": 2}
            | {"indexer_types": ["full"] * 3, "linear_conv_kernel_dim": 3}
            | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
    ),
}


def with_all_weights(directory: Path, seed: int = 5) -> Path:
    """The checkpoint in a directory, with random numbers where transformers begins with equal ones,
    or with so small ones that streams are hardly mixed by their contents."""
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(seed)
    for name, x in tensors.items():
        if name.endswith(("_ape", "_compress_gate", "_fn")):
            size = 1 if name.endswith("_ape") else x.shape[1] ** -0.5
            tensors[name] = (2 * size * rng.standard_normal(x.shape)).astype(np.float32)
    return save_tensors(directory, tensors, json.loads((directory / "config.json").read_text()))
