"""Phi-3, Phi-3.5 and Phi-4 (also mini): Llama with fused projections and longrope."""

import dataclasses

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of, model_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.windows import window_of
from jaxspec.models.json.keys import words

_OLD_LONGROPE = ("su", "yarn")  # what longrope was called first


def _read(hf: Keys) -> ModelConfig:
    scaling = hf["rope_scaling"]
    if isinstance(scaling, dict) and scaling.get("type") in _OLD_LONGROPE:
        hf = {**hf, "rope_scaling": scaling | {"type": "longrope", "rope_type": "longrope"}}
    plain = attention_of(hf, rope_of(hf), window_of(hf["sliding_window"]))
    attention = dataclasses.replace(plain, fused=True)
    layer = LayerConfig(attention, DenseConfig(hf["intermediate_size"], fused=True))
    return model_of(hf, [layer] * hf["num_hidden_layers"])


PHI3 = Family(
    "Phi3ForCausalLM",
    _read,
    keys=words("sliding_window partial_rotary_factor resid_pdrop embd_pdrop"),
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "partial_rotary_factor": None,
    },
    fixed={
        "lm_head_bias": (None, False),
        "full_attn_mod": (None, 1),
        "interpolate_factor": (None, 1),
    },
)
