"""Small random checkpoints of Qwen3-Next and Qwen 3.5, made with transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import load_file

from tests.helpers.checkpoints import TINY, save_random_model, save_tensors

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
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
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
    """A checkpoint of a variant. Norms, decays and biases are random; states forget slowly."""
    kind, own = VARIANTS[name]
    save_random_model(directory, kind(**TINY | HYBRID | own | overrides))
    return forgetting_slowly(directory)


def forgetting_slowly(directory: Path) -> Path:
    """The checkpoint in a directory, whose random recurrences would forget each token at once."""
    tensors, raw = contents(directory)
    for tensor, value in tensors.items():
        if tensor.endswith("A_log"):
            tensors[tensor] = value - np.float32(4)
    return save_tensors(directory, tensors, raw)


def contents(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a checkpoint, and its config."""
    tensors = load_file(directory / "model.safetensors")
    return tensors, json.loads((directory / "config.json").read_text())


def save_with_images(directory: Path, text: Path) -> Path:
    """The text model as part of a model of text and images, as Qwen 3.5 is published. Experts are
    in tensors of all of them."""
    tensors, inner = contents(text)
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    tensors = with_fused_experts(tensors)
    tensors["model.visual.pos_embed.weight"] = np.ones((16, 32), np.float32)
    [architecture], version = inner.pop("architectures"), inner.pop("transformers_version")
    raw = {
        "architectures": [architecture.replace("CausalLM", "ConditionalGeneration")],
        "model_type": inner["model_type"].removesuffix("_text"),
        "text_config": inner,
        "vision_config": VISION,
        "image_token_id": 5,
        "transformers_version": version,
    }
    return save_tensors(directory, tensors, raw)


def with_fused_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With the experts of each layer in two tensors."""
    found = {name: re.fullmatch(r"(.*\.experts\.)\d+\..*", name) for name in tensors}
    rest = {name: tensors[name] for name, match in found.items() if match is None}
    for own in {match[1] for match in found.values() if match}:
        count = sum(name.startswith(own) for name in tensors) // 3

        def all_of(kind: str, own: str = own, each: range = range(count)) -> np.ndarray:
            return np.stack([tensors[f"{own}{i}.{kind}_proj.weight"] for i in each])

        rest[f"{own}gate_up_proj"] = np.concatenate([all_of("gate"), all_of("up")], axis=1)
        rest[f"{own}down_proj"] = all_of("down")
    return rest
