"""Apertus: MLPs without a gate, norms of queries and keys."""

import dataclasses

from jaxspec.config.mlps import XieluConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of, model_of, sizes
from jaxspec.models.families.rope import PARAMETERS, rope_of
from jaxspec.models.json.keys import words


def _without_null_rope(raw: Keys) -> Keys:
    """The keys without rope parameters that are null: transformers has its default for them."""
    return {key: x for key, x in raw.items() if key not in PARAMETERS or x is not None}


def _read(hf: Keys) -> ModelConfig:
    attention = dataclasses.replace(attention_of(hf, rope_of(hf)), qk_norm=True)
    layer = LayerConfig(attention, XieluConfig(hf["intermediate_size"]))
    return model_of(hf, [layer] * hf["num_hidden_layers"])


APERTUS = Family(
    "ApertusForCausalLM",
    _read,
    keys=words("attention_bias hidden_dropout"),
    defaults=sizes(131072, 4096, 14336, 32, 32, 32, 65536)
    | {
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    fixed={
        "hidden_act": ("xielu",),
        "post_norm": (None, False),
        "qk_norm": (None, True),
    },
    rewrite=_without_null_rope,
    renames=(
        (r"\.attention_layernorm\.", ".input_layernorm."),
        (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
    ),
)
