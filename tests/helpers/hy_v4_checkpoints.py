"""Configs of small random Hy4 models, for alias_checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import load_file

from tests.helpers.checkpoints import TINY, save_tensors

# Texts are longer than what is attended to. Hardly any scores are equal, as those without a product
# above 0 are: of these transformers chooses any. Padding has embeddings of 0.
MODEL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "swiglu_limit": 0.3,
    "index_topk": 12,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "hc_mult": 3,
    "hc_magnitude": 1.5,
    "pad_token_id": None,
}
OF_IMAGES: dict[str, Any] = TINY | MODEL | {"eos_token_id": 2, "bos_token_id": 1}
OF_IMAGES["rope_parameters"] = {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hy_v4": (transformers.HYV4Config, MODEL),
    "hy_v4_vl": (
        transformers.HYV4VLConfig,
        {"text_config": OF_IMAGES, "vision_config": VISION, "tie_word_embeddings": False},
    ),
}


def with_all_weights(directory: Path, seed: int = 5) -> Path:
    """The checkpoint in a directory, with random numbers where transformers begins with so small
    ones that streams hardly depend on their contents."""
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(seed)
    for name, x in tensors.items():
        if name.endswith(("hc_fn", "hc_head_fn")):
            tensors[name] = (2 * x.shape[1] ** -0.5 * rng.standard_normal(x.shape)).astype(x.dtype)
        if name.endswith("_scale") and "hc_" in name:
            tensors[name] = (1 + 0.3 * rng.standard_normal(x.shape)).astype(x.dtype)
    return save_tensors(directory, tensors, json.loads((directory / "config.json").read_text()))
