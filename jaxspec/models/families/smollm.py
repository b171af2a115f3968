"""SmolLM3: Llama with layers that do not rotate (NoPE)."""

import dataclasses
from typing import Any

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of, model_of
from jaxspec.models.families.rope import rope_of, without_rope
from jaxspec.models.families.windows import FULL, SLIDING, window_of, windows_by_kind
from jaxspec.models.json.keys import WINDOW_KEYS, words
from jaxspec.models.json.values import shown


def _read(hf: Keys) -> ModelConfig:
    rope, bias, rotates = rope_of(hf), hf["attention_bias"], _rotates(hf)
    plain, mlp = without_rope(rope), DenseConfig(hf["intermediate_size"], hf["mlp_bias"])
    layers = []
    for window, rotated in zip(_windows(hf, rotates), rotates, strict=True):
        attention = attention_of(hf, rope if rotated else plain, window)
        layers.append(LayerConfig(dataclasses.replace(attention, qkv_bias=bias, o_bias=bias), mlp))
    return model_of(hf, layers)


def _rotates(hf: Keys) -> list[bool]:
    """Whether each layer rotates. In ``no_rope_layers`` 1 says that it does."""
    layers, given = hf["num_hidden_layers"], hf["no_rope_layers"]
    if given is None:
        return [bool(index % hf["no_rope_layer_interval"]) for index in range(1, layers + 1)]
    if not isinstance(given, list) or not all(flag in (0, 1) for flag in given):
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, got {shown(given)}")
    if len(given) != layers:
        raise ValueError(f"no_rope_layers has {len(given)} entries for {layers} layers")
    return [bool(flag) for flag in given]


def _windows(hf: Keys, rotates: list[bool]) -> tuple[int | None, ...]:
    window = window_of(hf["sliding_window"] if hf["use_sliding_window"] else None)
    kinds: Any = hf["layer_types"]
    if kinds is None:
        kinds = [FULL if rotated or window is None else SLIDING for rotated in rotates]
    return windows_by_kind(hf, window, kinds)


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    _read,
    keys=WINDOW_KEYS | words("attention_bias mlp_bias no_rope_layers no_rope_layer_interval"),
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "use_sliding_window": False,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
)
