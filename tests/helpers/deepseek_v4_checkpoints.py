"""Configs of small random DeepSeek-V4 models, for alias_checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import load_file

from tests.helpers.checkpoints import save_tensors

WINDOW, SPARSE, ALL = (
    *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
)
# A text of 40 tokens is longer than the window, and has many more entries than are attended to.
# Hardly any scores are equal, as those without a product above 0 are: of these transformers chooses
# any.
MODEL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "layer_types": [WINDOW, SPARSE, ALL],
    "compress_rates": {SPARSE: 3, ALL: 5},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "sliding_window": 7,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "swiglu_limit": 0.3,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek_v4": (transformers.DeepseekV4Config, MODEL),
    # As published, but for sizes: the last layer has the same entries as the one before the last.
    "deepseek_v4-yarn": (
        transformers.DeepseekV4Config,
        MODEL
        | {
            "o_groups": 4,
            "layer_types": [SPARSE, ALL, SPARSE],
            "compress_rates": {SPARSE: 4, ALL: 8},
        }
        | {"mlp_layer_types": ["hash_moe", "hash_moe", "moe"], "index_topk": 3}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 8,
                "beta_slow": 1,
            }
        },
    ),
}


def with_tables(directory: Path, seed: int = 5) -> Path:
    """The checkpoint in a directory, with other experts for each token: transformers begins with
    tables of zeros."""
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(seed)
    config = json.loads((directory / "config.json").read_text())
    for name, x in tensors.items():
        if name.endswith(".tid2eid"):
            order = rng.random((len(x), config["n_routed_experts"])).argsort(axis=1)
            tensors[name] = np.ascontiguousarray(order[:, : x.shape[1]])
    return save_tensors(directory, tensors, config)


def as_published(name: str) -> str:
    """Of a name that transformers 5.24 writes: it keeps ``model.`` and the norm of a head's key,
    which its table of names does not tell from others."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
    name = name.replace(".attn.norm.", ".attn.kv_norm.").replace("hc_head.hc_", "hc_head_")
    return name
