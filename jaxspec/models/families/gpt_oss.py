"""gpt-oss: experts with an activation of their own, attention sinks, alternating windows, yarn."""

import dataclasses

from jaxspec.config.experts import ClampedSwiglu, ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.rope import YarnRopeScaling
from jaxspec.models.families.family import Family, Keys, attention_of, check_agrees, model_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.routed import under_either_name
from jaxspec.models.families.windows import FULL, SLIDING, window_of, windows_by_kind
from jaxspec.models.json.keys import words


def _read(hf: Keys) -> ModelConfig:
    bias, experts, rope = hf["attention_bias"], _experts(hf), rope_of(hf)
    if isinstance(rope.scaling, YarnRopeScaling):
        original = rope.scaling.original_max_position
        check_agrees(hf, "initial_context_length", original, "original_max_position_embeddings")
    attention = dataclasses.replace(attention_of(hf, rope), qkv_bias=bias, o_bias=bias, sinks=True)
    kinds = hf["layer_types"]
    if kinds is None:
        kinds = [(SLIDING, FULL)[layer % 2] for layer in range(hf["num_hidden_layers"])]
    windows = windows_by_kind(hf, window_of(hf["sliding_window"]), kinds)
    mixers = (dataclasses.replace(attention, window=window) for window in windows)
    return model_of(hf, [LayerConfig(mixer, experts) for mixer in mixers])


def _experts(hf: Keys) -> ExpertsConfig:
    routing = RoutingConfig(
        under_either_name(hf, "num_local_experts", "num_experts", 128),
        under_either_name(hf, "num_experts_per_tok", "experts_per_token", 4),
        "chosen",
        bias=True,
    )
    return ExpertsConfig(
        hf["intermediate_size"],
        routing,
        activation=ClampedSwiglu(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"])),
        bias=True,
        names=ExpertNames(router="router"),
        fused="interleaved",
    )


GPT_OSS = Family(
    "GptOssForCausalLM",
    _read,
    keys=words(
        """attention_bias sliding_window layer_types num_local_experts num_experts
        num_experts_per_tok experts_per_token swiglu_alpha swiglu_limit initial_context_length"""
    ),
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "eos_token_id": None,
        "initial_context_length": None,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": None,
        "num_experts": None,
        "num_experts_per_tok": None,
        "experts_per_token": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
