"""Model shapes by name, with the values of the published ``config.json`` files."""

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.model import LayerConfig, ModelConfig, dense_model
from jaxspec.config.rope import Llama3RopeScaling
from jaxspec.models.from_config.model import parse_model_config


def _llama3(num_layers: int, rope_factor: float, **values: Any) -> ModelConfig:
    return dense_model(
        num_layers=num_layers,
        vocab_size=128_256,
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position=131_072,
        rope_scaling=Llama3RopeScaling(rope_factor, 1.0, 4.0, 8192),
        **values,
    )


def _with_experts(model: ModelConfig, num_experts: int, top_k: int, size: int) -> ModelConfig:
    """The model with experts of ``size`` hidden units in every layer, chosen as Qwen3's are."""
    mlp = ExpertsConfig(size, RoutingConfig(num_experts, top_k, normalize=True))
    return model.map_layers(lambda layer: LayerConfig(layer.mixer, mlp))


def _tiny(hidden: int, intermediate: int, num_heads: int, head_dim: int) -> ModelConfig:
    """Not a published model: for smoke tests on a CPU."""
    return dense_model(
        num_layers=4,
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position=4096,
    )


_TINY = _tiny(64, 128, num_heads=8, head_dim=16)
# So wide that 8 devices can split its groups of 128 weights (--quantization w4a16).
_TINY_WIDE = _tiny(128, 1024, num_heads=16, head_dim=64)
_LLAMA_70B = _llama3(
    80, 8.0, hidden_size=8192, intermediate_size=28_672, num_heads=64, head_dim=128
)
SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-3.1-8b": _llama3(
            32, 8.0, hidden_size=4096, intermediate_size=14_336, num_heads=32, head_dim=128
        ),
        "llama-3.1-70b": _LLAMA_70B,
        "llama-3.3-70b": _LLAMA_70B,  # trained anew, of the same sizes
        "llama-3.2-1b": _llama3(
            16,
            32.0,
            hidden_size=2048,
            intermediate_size=8192,
            num_heads=32,
            head_dim=64,
            tie_word_embeddings=True,
        ),
        "qwen3-8b": dense_model(
            num_layers=36,
            vocab_size=151_936,
            hidden_size=4096,
            intermediate_size=12_288,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=1_000_000.0,
            max_position=40_960,
            qk_norm=True,
        ),
        "qwen3-30b-a3b": _with_experts(
            dense_model(
                num_layers=48,
                vocab_size=151_936,
                hidden_size=2048,
                intermediate_size=6144,
                num_heads=32,
                num_kv_heads=4,
                head_dim=128,
                rms_norm_eps=1e-6,
                rope_theta=1_000_000.0,
                max_position=40_960,
                qk_norm=True,
            ),
            num_experts=128,
            top_k=8,
            size=768,
        ),
        "qwen2.5-7b": dense_model(
            num_layers=28,
            vocab_size=152_064,
            hidden_size=3584,
            intermediate_size=18_944,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=1_000_000.0,
            max_position=32_768,
            qkv_bias=True,
        ),
        "mistral-7b": dense_model(  # v0.3, which has no sliding window
            num_layers=32,
            vocab_size=32_768,
            hidden_size=4096,
            intermediate_size=14_336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=1_000_000.0,
            max_position=32_768,
        ),
        "qwen3.5-9b": parse_model_config(  # the values of its config.json are the family's defaults
            {
                "model_type": "qwen3_5_text",
                "max_position_embeddings": 262_144,
                "rope_theta": 10_000_000.0,
            }
        ),
        "deepseek-v3": parse_model_config(
            {
                "model_type": "deepseek_v3",
                "vocab_size": 129_280,
                "hidden_size": 7168,
                "intermediate_size": 18_432,
                "num_hidden_layers": 61,
                "num_nextn_predict_layers": 1,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "n_shared_experts": 1,
                "moe_intermediate_size": 2048,
                "first_k_dense_replace": 3,
                "n_group": 8,
                "topk_group": 4,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 163_840,
                "rope_theta": 10_000.0,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            }
        ),
        "tiny": _TINY,
        "tiny-wide": _TINY_WIDE,
        "tiny-experts": _with_experts(_TINY, num_experts=8, top_k=2, size=64),
        "tiny-hybrid": parse_model_config(
            {
                "model_type": "qwen3_next",
                "vocab_size": 1000,
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 16,
                "max_position_embeddings": 4096,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 8,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
            }
        ),
    }
)


def model_shape(name: str, layers: int | None = None) -> ModelConfig:
    """A shape by name. ``layers``: so many of its layers, from the first on and then again; None:
    all.

    Raises ValueError for no layers.
    """
    config = SHAPES[name]
    if layers is None:
        return config
    if layers < 1:
        raise ValueError(f"--layers must be at least 1, got {layers}")
    chosen = itertools.islice(itertools.cycle(config.layers), layers)
    return dataclasses.replace(config, layers=tuple(chosen))
