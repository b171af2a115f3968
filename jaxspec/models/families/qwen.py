"""Qwen 2, 2.5 and 3, dense, and MiMo: biases on q, k and v, or norms of queries and keys."""

import dataclasses
from typing import Any

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import BEFORE_AFTER
from jaxspec.models.families.family import Family, Keys, attention_of, model_of, mtp_of
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.windows import FULL, SLIDING, optional_windows
from jaxspec.models.families.writing import alike, windows_of
from jaxspec.models.json.keys import WINDOW_KEYS

_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def _read(hf: Keys, *, qkv_bias: bool, o_bias: bool, qk_norm: bool) -> ModelConfig:
    rope, mlp = rope_of(hf), DenseConfig(hf["intermediate_size"])
    plain = attention_of(hf, rope)
    attention = dataclasses.replace(plain, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm)
    windows = optional_windows(hf)
    return model_of(
        hf, [LayerConfig(dataclasses.replace(attention, window=w), mlp) for w in windows]
    )


def _read_qwen2(hf: Keys) -> ModelConfig:
    return _read(hf, qkv_bias=True, o_bias=False, qk_norm=False)


def _read_mimo(hf: Keys) -> ModelConfig:
    # As its authors do it in vLLM (mimo.py, mimo_mtp.py): the model's state before its norm, then
    # the layer's own after final_layernorm. Other engines differ: docs/drafters.md.
    return dataclasses.replace(_read_qwen2(hf), mtp=mtp_of(hf, "mimo", BEFORE_AFTER))


def _read_qwen3(hf: Keys) -> ModelConfig:
    bias = hf["attention_bias"]
    return _read(hf, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    windows = windows_of(config)
    window = next(filter(None, windows), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [SLIDING if size else FULL for size in windows],
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    attention, _ = alike(config)
    return _write_qwen2(config) | {"attention_bias": attention.qkv_bias}


QWEN2 = Family(
    "Qwen2ForCausalLM", _read_qwen2, keys=WINDOW_KEYS, defaults=_DEFAULTS, write=_write_qwen2
)
MIMO = Family(  # the code of MiMo-7B comes with its checkpoints: layers are those of Qwen2
    "MiMoForCausalLM",
    _read_mimo,
    keys=WINDOW_KEYS,
    defaults=_DEFAULTS,
    fixed={"attention_bias": (None, True)},
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    _read_qwen3,
    keys=WINDOW_KEYS | {"attention_bias"},
    defaults=_DEFAULTS | {"head_dim": 128},
    write=_write_qwen3,
)
