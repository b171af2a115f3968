"""Model shapes by name, with the values of the published ``config.json`` files."""

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.model import LayerConfig, ModelConfig, dense_model
from jaxspec.config.rope import Llama3RopeScaling
from jaxspec.evaluation.benchmarks.sparse_shapes import SPARSE_SHAPES
from jaxspec.models.from_config.model import parse_model_config


def _llama3(rope_factor: float) -> dict[str, Any]:
    scaling = Llama3RopeScaling(rope_factor, 1.0, 4.0, 8192)
    return {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position": 131_072,
        "rope_scaling": scaling,
    }


_LLAMA_31 = _llama3(8.0)
_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position": 40_960, "qk_norm": True}
_QWEN25 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position": 32_768, "qkv_bias": True}
_MISTRAL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position": 32_768}
_SMOLLM2 = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "max_position": 8192,
    "tie_word_embeddings": True,
}
_TINY = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position": 4096}
# Layers, vocabulary, hidden size, size of the MLP, query heads, KV heads, size of a head; the rest.
_DENSE: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "llama-3.1-8b": ((32, 128_256, 4096, 14_336, 32, 8, 128), _LLAMA_31),
    "llama-3.1-70b": ((80, 128_256, 8192, 28_672, 64, 8, 128), _LLAMA_31),
    "llama-3.3-70b": ((80, 128_256, 8192, 28_672, 64, 8, 128), _LLAMA_31),
    "llama-3.2-1b": (
        (16, 128_256, 2048, 8192, 32, 8, 64),
        _llama3(32.0) | {"tie_word_embeddings": True},
    ),
    "smollm2-135m": ((30, 49_152, 576, 1536, 9, 3, 64), _SMOLLM2),
    "qwen3-8b": ((36, 151_936, 4096, 12_288, 32, 8, 128), _QWEN3),
    "qwen3-30b-a3b": ((48, 151_936, 2048, 6144, 32, 4, 128), _QWEN3),
    "qwen2.5-7b": ((28, 152_064, 3584, 18_944, 28, 4, 128), _QWEN25),
    "mistral-7b": ((32, 32_768, 4096, 14_336, 32, 8, 128), _MISTRAL),  # v0.3: no sliding window
    # Not published models, but for smoke tests on a CPU.
    "tiny": ((4, 1000, 64, 128, 8, 4, 16), _TINY),
    # So wide that 8 devices can split its groups of 128 weights (--quantization w4a16).
    "tiny-wide": ((4, 1000, 128, 1024, 16, 8, 64), _TINY),
    "tiny-experts": ((4, 1000, 64, 128, 8, 4, 16), _TINY),
}
# Experts of every layer, how many a token chooses, and their hidden units.
_EXPERTS = {"qwen3-30b-a3b": (128, 8, 768), "tiny-experts": (8, 2, 64)}


def _dense_shape(name: str) -> ModelConfig:
    (layers, vocab, hidden, units, heads, kv_heads, head_dim), rest = _DENSE[name]
    model = dense_model(
        num_layers=layers,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=units,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **rest,
    )
    if name not in _EXPERTS:
        return model
    num_experts, top_k, size = _EXPERTS[name]
    mlp = ExpertsConfig(size, RoutingConfig(num_experts, top_k, normalize=True))  # as Qwen3's
    return model.map_layers(lambda layer: LayerConfig(layer.mixer, mlp))


SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        **{name: _dense_shape(name) for name in _DENSE},
        "qwen3.5-9b": parse_model_config(  # the values of its config.json are the family's defaults
            {
                "model_type": "qwen3_5_text",
                "max_position_embeddings": 262_144,
                "rope_theta": 10_000_000.0,
            }
        ),
        "gemma-2-9b": parse_model_config(
            {
                "model_type": "gemma2",
                "vocab_size": 256_000,
                "hidden_size": 3584,
                "intermediate_size": 14_336,
                "num_hidden_layers": 42,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 8192,
                "rope_theta": 10_000.0,
            }
        ),
        # What its text_config does not say are the family's defaults: 8 heads of 256, 4 KV heads.
        "gemma-3-4b": parse_model_config(
            {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
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
        # The values of its text_config are the family's defaults.
        "qwen3.6-35b-a3b": parse_model_config(
            {
                "model_type": "qwen3_5_moe_text",
                "mtp_num_hidden_layers": 1,
                "max_position_embeddings": 262_144,
                "rope_theta": 10_000_000.0,
            }
        ),
        "gpt-oss-20b": parse_model_config(
            {
                "model_type": "gpt_oss",
                "vocab_size": 201_088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 24,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "swiglu_limit": 7.0,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131_072,
                "rope_theta": 150_000.0,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                },
            }
        ),
        **{name: parse_model_config(raw) for name, raw in SPARSE_SHAPES.items()},
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
