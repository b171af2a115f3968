"""Falcon-H1: in every layer Mamba-2 and attention side by side, and a dozen multipliers.

Those of embeddings and logits are numbers of the model, and that of keys is part of the scores'
scale. The others are multiplied into the weights of projections when these are read.
"""

import dataclasses
from typing import Any

from jaxspec.config.mixers import AttentionConfig, SideBySideConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.recurrent import Mamba2Config
from jaxspec.models.families.family import Family, Keys, attention_of, dense_of, model_of, sizes
from jaxspec.models.families.mamba_hybrid import MAMBA_DEFAULTS, MAMBA_FIXED, mamba_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_number, shown


def _factors(hf: Keys, key: str, count: int) -> tuple[float, ...]:
    """Those of a key, of ones if it is null. Raises ValueError for what is no list of so many."""
    given: Any = hf[key]
    if given is None:
        return (1.0,) * count
    known = isinstance(given, list) and len(given) == count
    if not known or not all(map(is_positive_number, given)):
        raise ValueError(f"{key} must be a list of {count} numbers above 0, got {shown(given)}")
    return tuple(map(float, given))


def _attention(hf: Keys) -> AttentionConfig:
    """Queries and keys count by their products alone, so their multipliers are one of the scores.

    Raises ValueError for a multiplier of what is read, beside biases that it does not multiply.
    """
    plain, read = attention_of(hf, rope_of(hf)), float(hf["attention_in_multiplier"])
    if hf["attention_bias"] and read != 1:
        raise ValueError("attention_bias is supported with attention_in_multiplier 1 only")
    factor = float(hf["key_multiplier"]) * read**2
    return dataclasses.replace(
        plain,
        scale=None if factor == 1 else factor * plain.head_dim**-0.5,
        out_multiplier=read * float(hf["attention_out_multiplier"]),
    )


def _mamba(hf: Keys) -> Mamba2Config:
    """Raises ValueError for heads that do not fit the layer's width, and as _attention does."""
    width, read = hf["mamba_d_ssm"], float(hf["ssm_in_multiplier"])
    if width is None:
        mamba = mamba_of(hf)
    else:
        mamba = mamba_of(hf, width, "mamba_d_ssm")
    if hf["mamba_proj_bias"] and read != 1:
        raise ValueError("mamba_proj_bias is supported with ssm_in_multiplier 1 only")
    if hf["projectors_bias"] != hf["mamba_proj_bias"]:
        raise ValueError("projectors_bias and mamba_proj_bias must be equal")
    norm = "before gate" if hf["mamba_norm_before_gate"] else "after gate"
    z, x, b, c, dt = (read * factor for factor in _factors(hf, "ssm_multipliers", 5))
    return dataclasses.replace(
        mamba,
        norm=norm if hf["mamba_rms_norm"] else None,
        multipliers=(z, x, b, c, dt),
        out_multiplier=float(hf["ssm_out_multiplier"]),
    )


def _mlp(hf: Keys) -> DenseConfig:
    gate, down = _factors(hf, "mlp_multipliers", 2)
    return dataclasses.replace(dense_of(hf), gate_multiplier=gate, down_multiplier=down)


def _read(hf: Keys) -> ModelConfig:
    layer = LayerConfig(SideBySideConfig(_mamba(hf), _attention(hf)), _mlp(hf))
    return dataclasses.replace(
        model_of(hf, [layer] * hf["num_hidden_layers"]),
        embed_scale=float(hf["embedding_multiplier"]),
        logit_divisor=1 / float(hf["lm_head_multiplier"]),
    )


_MULTIPLIERS = words(
    """embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier
    attention_out_multiplier ssm_in_multiplier ssm_out_multiplier"""
)
FALCON_H1 = Family(
    "FalconH1ForCausalLM",
    _read,
    keys=words("attention_bias mlp_bias mamba_chunk_size num_logits_to_keep"),
    defaults=dict(MAMBA_DEFAULTS)
    | sizes(128000, 4096, 14336, 32, 32, 8, 8192)
    | {"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "projectors_bias": False}
    | {"mamba_norm_before_gate": True, "mamba_rms_norm": False}
    | {"mlp_multipliers": None, "ssm_multipliers": None}
    | dict.fromkeys(_MULTIPLIERS, 1.0),
    fixed=dict(MAMBA_FIXED) | {"attn_layer_indices": (None,), "mamba_use_mlp": (None, True)},
    renames=(
        (r"^model\.final_layernorm\.", "model.norm."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
    ),
)
