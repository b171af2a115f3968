"""OLMo 2 and 3: norms after mixer and MLP, and of queries and keys over all heads.

OLMo 3 has windows in three layers of four. Only its other layers have a scaled rope.
"""

import dataclasses
from typing import Any

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.families.family import Family, Keys, attention_of, model_of
from jaxspec.models.families.rope import rope_from, rope_of
from jaxspec.models.families.windows import FULL, SLIDING, window_of, windows_by_kind
from jaxspec.models.json.keys import words

_DEFAULTS = {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}


def _layer(hf: Keys, rope: RopeConfig, window: int | None) -> LayerConfig:
    plain, bias = attention_of(hf, rope, window), hf["attention_bias"]
    norms = {"qk_norm": True, "whole_qk_norm": True}
    attention = dataclasses.replace(plain, qkv_bias=bias, o_bias=bias, **norms)
    return LayerConfig(attention, DenseConfig(hf["intermediate_size"]), norms="after")


def _read_olmo2(hf: Keys) -> ModelConfig:
    return model_of(hf, [_layer(hf, rope_of(hf), None)] * hf["num_hidden_layers"])


def _read_olmo3(hf: Keys) -> ModelConfig:
    kinds = hf["layer_types"]
    if kinds is None:
        count = range(1, hf["num_hidden_layers"] + 1)
        kinds = [SLIDING if index % 4 else FULL for index in count]
    windows = windows_by_kind(hf, window_of(hf["sliding_window"]), kinds)
    given: Any = hf["rope_parameters"]
    nested = given if isinstance(given, dict) and given.keys() <= {FULL, SLIDING} else {}
    whole = nested.get(FULL) if nested else hf["rope_scaling"] or given
    full = rope_from(hf, whole, hf["rope_theta"])
    sliding = rope_from(hf, nested.get(SLIDING), hf["rope_theta"])
    return model_of(
        hf, [_layer(hf, full if window is None else sliding, window) for window in windows]
    )


OLMO2 = Family("Olmo2ForCausalLM", _read_olmo2, keys=words("attention_bias"), defaults=_DEFAULTS)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    _read_olmo3,
    keys=words("attention_bias sliding_window layer_types"),
    defaults=_DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None},
)
