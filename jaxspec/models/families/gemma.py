"""Gemma 1, 2 and 3 (text): norms that multiply by 1 + w, scaled embeddings, GELU.

Gemma 2 norms also what mixers and MLPs give, caps scores and logits, and has a window in every
second layer. Gemma 3 norms queries and keys instead of capping, and rotates layers with windows by
another theta.
"""

import dataclasses
import math
from typing import Any, Literal

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_agrees,
    head_dim,
    model_of,
)
from jaxspec.models.families.rope import rope_from, rope_of
from jaxspec.models.families.windows import FULL, SLIDING, windows_of_most
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import shown

_DEFAULTS = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA1 = _DEFAULTS | {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_GEMMA2 = _DEFAULTS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
    "_sliding_window_pattern": None,
}
_GELU = "gelu_pytorch_tanh"
_FIXED = {
    "hidden_activation": (None, _GELU),
    "use_bidirectional_attention": (None, False),
}


def _model(hf: Keys, layers: list[LayerConfig]) -> ModelConfig:
    model = model_of(hf, layers, norm_offset=1)
    cap = hf.get("final_logit_softcapping")
    return dataclasses.replace(model, embed_scale=math.sqrt(hf["hidden_size"]), logit_softcap=cap)


def _layer(
    hf: Keys,
    rope: RopeConfig,
    window: int | None = None,
    *,
    norms: Literal["before", "both"] = "both",
    qk_norm: bool = False,
) -> LayerConfig:
    plain, scalar = attention_of(hf, rope, window), hf.get("query_pre_attn_scalar")
    scale = None if scalar in (None, head_dim(hf)) else scalar**-0.5
    cap = hf.get("attn_logit_softcapping")
    attention = dataclasses.replace(plain, qk_norm=qk_norm, scale=scale, softcap=cap)
    mlp = DenseConfig(hf["intermediate_size"], activation="gelu_tanh")
    return LayerConfig(attention, mlp, norms)


def _read_gemma1(hf: Keys) -> ModelConfig:
    return _model(hf, [_layer(hf, rope_of(hf), norms="before")] * hf["num_hidden_layers"])


def _read_gemma2(hf: Keys) -> ModelConfig:
    check_agrees(hf, "sliding_window_size", hf["sliding_window"], "sliding_window")
    rope = rope_of(hf)
    return _model(hf, [_layer(hf, rope, window) for window in windows_of_most(hf, 2)])


def _read_gemma3(hf: Keys) -> ModelConfig:
    full, sliding = _ropes(hf)
    every = hf["sliding_window_pattern"]
    if hf["layer_types"] is None:  # transformers reads layer_types, or else the first name
        check_agrees(hf, "_sliding_window_pattern", every, "sliding_window_pattern")
    windows = windows_of_most(hf, every)
    return _model(
        hf, [_layer(hf, sliding if size else full, size, qk_norm=True) for size in windows]
    )


def _ropes(hf: Keys) -> tuple[Any, Any]:
    """The ropes of full and of sliding attention. Parameters that are not nested are those of full
    attention."""
    nested: Any = hf["rope_parameters"] or {}
    if not isinstance(nested, dict):
        raise ValueError(f"rope parameters must be an object, got {shown(nested)}")
    if nested and not nested.keys() <= {FULL, SLIDING}:
        raise ValueError(f"rope_parameters must have {FULL} and {SLIDING}, got {shown(nested)}")
    full = hf["rope_scaling"] or nested.get(FULL)
    return (
        rope_from(hf, full, hf["rope_theta"]),
        rope_from(hf, nested.get(SLIDING), hf["rope_local_base_freq"]),
    )


GEMMA = Family(
    "GemmaForCausalLM",
    _read_gemma1,
    keys=words("attention_bias"),
    defaults=_GEMMA1,
    fixed=_FIXED | {"hidden_act": ("gelu", _GELU)},  # both mean the approximation by tanh
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    _read_gemma2,
    keys=words("attention_bias cache_implementation"),
    defaults=_GEMMA2 | {"sliding_window_size": None},
    fixed=_FIXED | {"hidden_act": (_GELU,)},
)
_CAP = "attn_logit_softcapping"
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _read_gemma3,
    keys=words("attention_bias cache_implementation"),
    defaults=_GEMMA3,
    fixed={**GEMMA2.fixed, _CAP: (None,)},  # transformers reads it and does not cap the scores
)
# The text model of one of text and images. Its text attends causally; only images do not.
GEMMA3_IMAGES = WithImages("Gemma3ForConditionalGeneration", {"gemma3_text": GEMMA3})
