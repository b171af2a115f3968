"""Llama 2 and 3, and models of other makers in the same format."""

import dataclasses
from typing import Any

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of, model_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.windows import optional_windows
from jaxspec.models.families.writing import alike
from jaxspec.models.json.keys import WINDOW_KEYS, words


def _read(hf: Keys) -> ModelConfig:
    rope, bias = rope_of(hf), hf["attention_bias"]
    mlp = DenseConfig(hf["intermediate_size"], hf["mlp_bias"])
    layers = []
    for window in optional_windows(hf):
        attention = attention_of(hf, rope, window)
        layers.append(LayerConfig(dataclasses.replace(attention, qkv_bias=bias, o_bias=bias), mlp))
    return model_of(hf, layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    attention, mlp = alike(config)
    return {"attention_bias": attention.qkv_bias, "mlp_bias": mlp.bias}


def _unused_windows(raw: Keys) -> frozenset[str]:
    """The window keys of a config that was copied from Qwen's, if they are not in use."""
    unused = raw.get("use_sliding_window") is False or raw.get("sliding_window") is None
    return WINDOW_KEYS if unused and not raw.get("use_sliding_window") else frozenset()


LLAMA = Family(
    "LlamaForCausalLM",
    _read,
    keys=words("attention_bias mlp_bias"),
    defaults={
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "use_sliding_window": False,
        "max_window_layers": 0,
        "layer_types": None,
    },
    more_keys=_unused_windows,
    write=_write,
)
