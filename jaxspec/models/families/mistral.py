"""Mistral: Llama with one window for all layers."""

from typing import Any

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of, model_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.windows import window_of
from jaxspec.models.families.writing import windows_of
from jaxspec.models.json.keys import words


def _read(hf: Keys) -> ModelConfig:
    attention = attention_of(hf, rope_of(hf), window_of(hf["sliding_window"]))
    layer = LayerConfig(attention, DenseConfig(hf["intermediate_size"]))
    return model_of(hf, [layer] * hf["num_hidden_layers"])


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": next(filter(None, windows_of(config)), None)}


MISTRAL = Family(
    "MistralForCausalLM",
    _read,
    keys=words("sliding_window"),
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    write=_write,
)
