"""Small random block heads with the tensors and the config fields of published ones."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxspec.models.json.values import read_json
from tests.helpers.checkpoints import save_tensors

MASK, RANK, LAYERS = 250, 16, 2


def published_head(directory: str | Path, target_dir: str | Path, kind: str, seed: int = 0) -> Path:
    """For the target in ``target_dir``; ``kind`` is ``dflash`` or ``dspark``."""
    rng, target = np.random.default_rng(seed), read_json(Path(target_dir) / "config.json")
    hidden, vocab, features = target["hidden_size"], target["vocab_size"], 2
    config = _layers(hidden, vocab) | {
        "block_size": 6,
        "num_target_layers": target["num_hidden_layers"],
    }
    options: dict[str, Any] = {"target_layer_ids": [-1, 0], "mask_token_id": MASK}
    shapes = {
        "fc.weight": (hidden, features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(LAYERS):
        shapes |= _layer_shapes(config, f"layers.{index}.")
    if kind == "dflash":
        config |= {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "dflash_config": options,
        }
    else:
        shapes |= {
            "embed_tokens.weight": (vocab, hidden),
            "lm_head.weight": (vocab, hidden),
            "markov_head.markov_w1.weight": (vocab, RANK),
            "markov_head.markov_w2.weight": (vocab, RANK),
            "confidence_head.proj.weight": (1, hidden + RANK),
            "confidence_head.proj.bias": (1,),
        }
        config |= options | {
            "architectures": ["Qwen3DSparkModel"],
            "tie_word_embeddings": False,
            "num_anchors": 512,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
        }
    tensors = {name: _random(rng, shape) for name, shape in shapes.items()}
    if kind == "dspark":  # its tables are the target's
        of_target = load_file(Path(target_dir) / "model.safetensors")
        tensors["embed_tokens.weight"] = embed = of_target["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = of_target.get("lm_head.weight", embed.copy())
    return save_tensors(directory, tensors, config)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    noise = 0.2 * rng.standard_normal(shape)
    return (noise + (len(shape) == 1)).astype(np.float32)


def _layers(hidden: int, vocab: int) -> dict[str, Any]:
    """The fields that the layers have, and those of transformers around them."""
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": 40960,
        "max_window_layers": LAYERS,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


def _layer_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, ff, head_dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries, keys = (head_dim * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ff, hidden),
        "mlp.up_proj": (ff, hidden),
        "mlp.down_proj": (hidden, ff),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
