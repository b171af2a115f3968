"""Configs of small random Qwen3.8-Flash-Next models, for alias_checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import load_file

from tests.helpers.checkpoints import TINY, save_tensors

LINEAR, FULL = "linear_attention", "full_attention"
# A text of 40 tokens has many more spans than are attended to. Hardly any scores are equal, as
# those without a product above 0 are: of these transformers chooses any. The first token that ends
# a text is inside of those of test_parity.py twice.
TEXT: dict[str, Any] = TINY | {
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, LINEAR, FULL],
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "hc_count": 3,
    "hc_lowrank": 12,
    "ple_layer_ids": [2],
    "ple_embed_dim": 48,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 9,
    "indexer_compress_ratio": 3,
    "eos_token_id": [39, 2],
    "bos_token_id": 1,
    "pad_token_id": None,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2} | {
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen4_exp": (
        transformers.Qwen4ExpConfig,
        {"text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False},
    ),
    # Text alone; n-grams of two layers, of up to four tokens; whole heads are rotated.
    "qwen4_exp_text": (
        transformers.Qwen4ExpTextConfig,
        TEXT
        | {"layer_types": [LINEAR, FULL, LINEAR], "output_gate_type": None, "hc_count": 4}
        | {"ple_layer_ids": [1, 3], "ngram_size": 4, "ple_embed_dim": 36, "split_ngram_parts": 3}
        | {"ple_conv_kernel_size": 3, "num_attention_heads": 2, "indexer_head_dim": 16}
        | {"indexer_budget": 8, "indexer_compress_ratio": 2, "norm_topk_prob": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "eos_token_id": 93},
    ),
}


def with_all_weights(directory: Path, seed: int = 5) -> Path:
    """The checkpoint in a directory, with random numbers where transformers begins with zeros."""
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(seed)
    for name, x in tensors.items():
        if name.endswith(".ple.conv1d.weight"):
            tensors[name] = (0.5 * rng.standard_normal(x.shape)).astype(np.float32)
    return save_tensors(directory, tensors, json.loads((directory / "config.json").read_text()))
