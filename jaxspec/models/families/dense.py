"""Llama 2 and 3, models of other makers in the same format, and families that differ little from
them: Mistral, Qwen 2 to 3, MiMo, Phi-3 and 4, SmolLM3, Granite 3, and OLMo 2 and 3."""

import dataclasses
from typing import Any

from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import BEFORE_AFTER
from jaxspec.config.rope import RopeConfig
from jaxspec.models.families.family import Family, Keys, attention_of, dense_of, model_of, mtp_of
from jaxspec.models.families.rope import rope_from, rope_of, without_rope
from jaxspec.models.families.windows import (
    FULL,
    SLIDING,
    optional_windows,
    window_of,
    windows_by_kind,
    windows_of_most,
)
from jaxspec.models.json.keys import WINDOW_KEYS, words
from jaxspec.models.json.values import shown


def _with_windows(hf: Keys, attention: AttentionConfig) -> ModelConfig:
    """A model whose layers differ in their windows alone."""
    mixers = (dataclasses.replace(attention, window=window) for window in optional_windows(hf))
    return model_of(hf, [LayerConfig(mixer, dense_of(hf)) for mixer in mixers])


def _read_llama(hf: Keys) -> ModelConfig:
    return _with_windows(hf, attention_of(hf, rope_of(hf)))


def _unused_windows(raw: Keys) -> frozenset[str]:
    """The window keys of a config that was copied from Qwen's, if they are not in use."""
    unused = raw.get("use_sliding_window") is False or raw.get("sliding_window") is None
    return WINDOW_KEYS if unused and not raw.get("use_sliding_window") else frozenset()


LLAMA = Family(
    "LlamaForCausalLM",
    _read_llama,
    keys=words("attention_bias mlp_bias"),
    defaults={
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "use_sliding_window": False,
        "max_window_layers": 0,
        "layer_types": None,
    },
    fixed={"use_sliding_window": (None, False)},
    more_keys=_unused_windows,
    writes=words("attention_bias mlp_bias"),
)


def _read_mistral(hf: Keys) -> ModelConfig:
    layer = LayerConfig(attention_of(hf, rope_of(hf), window_of(hf)), dense_of(hf))
    return model_of(hf, [layer] * hf["num_hidden_layers"])


MISTRAL = Family(  # one window for all layers
    "MistralForCausalLM",
    _read_mistral,
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    writes=words("sliding_window"),
)


def _read_qwen2(hf: Keys) -> ModelConfig:
    plain = attention_of(hf, rope_of(hf))
    return _with_windows(hf, dataclasses.replace(plain, qkv_bias=True, o_bias=False))


def _read_mimo(hf: Keys) -> ModelConfig:
    # As its authors do it in vLLM (mimo.py, mimo_mtp.py): the model's state before its norm, then
    # the layer's own after final_layernorm. Other engines differ: docs/drafters.md.
    return dataclasses.replace(_read_qwen2(hf), mtp=mtp_of(hf, "mimo", BEFORE_AFTER))


def _read_qwen3(hf: Keys) -> ModelConfig:
    return _with_windows(hf, dataclasses.replace(attention_of(hf, rope_of(hf)), qk_norm=True))


_QWEN = {
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
_QWEN_WRITES = words("use_sliding_window sliding_window layer_types")
QWEN2 = Family("Qwen2ForCausalLM", _read_qwen2, defaults=_QWEN, writes=_QWEN_WRITES)
MIMO = Family(  # the code of MiMo-7B comes with its checkpoints: layers are those of Qwen2
    "MiMoForCausalLM", _read_mimo, defaults=_QWEN, fixed={"attention_bias": (None, True)}
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    _read_qwen3,
    keys=words("attention_bias"),
    defaults=_QWEN | {"head_dim": 128},
    writes=_QWEN_WRITES | {"attention_bias"},
)


def _read_phi3(hf: Keys) -> ModelConfig:
    scaling = hf["rope_scaling"]
    if isinstance(scaling, dict) and scaling.get("type") in ("su", "yarn"):  # its first names
        hf = {**hf, "rope_scaling": scaling | {"type": "longrope", "rope_type": "longrope"}}
    plain = attention_of(hf, rope_of(hf), window_of(hf))
    mlp = DenseConfig(hf["intermediate_size"], fused=True)
    layer = LayerConfig(dataclasses.replace(plain, fused=True), mlp)
    return model_of(hf, [layer] * hf["num_hidden_layers"])


PHI3 = Family(  # also Phi-3.5 and Phi-4: fused projections and longrope
    "Phi3ForCausalLM",
    _read_phi3,
    keys=words("sliding_window resid_pdrop embd_pdrop"),
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


def _read_smollm3(hf: Keys) -> ModelConfig:
    rope, rotates = rope_of(hf), rotating_layers(hf)
    has_windows = window_of(hf) is not None
    kinds = [SLIDING if has_windows and not rotated else FULL for rotated in rotates]
    layers = []
    for window, rotated in zip(windows_by_kind(hf, kinds), rotates, strict=True):
        attention = attention_of(hf, rope if rotated else without_rope(rope), window)
        layers.append(LayerConfig(attention, dense_of(hf)))
    return model_of(hf, layers)


def rotating_layers(hf: Keys) -> list[bool]:
    """Whether each layer rotates. In ``no_rope_layers`` 1 says that it does."""
    layers, given = hf["num_hidden_layers"], hf["no_rope_layers"]
    if given is None:
        return [bool(index % hf["no_rope_layer_interval"]) for index in range(1, layers + 1)]
    if not isinstance(given, list) or not all(flag in (0, 1) for flag in given):
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, got {shown(given)}")
    if len(given) != layers:
        raise ValueError(f"no_rope_layers has {len(given)} entries for {layers} layers")
    return [bool(flag) for flag in given]


SMOLLM3 = Family(  # layers that do not rotate (NoPE)
    "SmolLM3ForCausalLM",
    _read_smollm3,
    keys=words("attention_bias mlp_bias sliding_window max_window_layers"),
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


def read_granite(hf: Keys) -> ModelConfig:
    scale = float(hf["attention_multiplier"])
    attention = dataclasses.replace(attention_of(hf, rope_of(hf)), scale=scale)
    residual_scale = float(hf["residual_multiplier"])
    layer = LayerConfig(attention, dense_of(hf), residual_scale=residual_scale)
    return dataclasses.replace(
        model_of(hf, [layer] * hf["num_hidden_layers"]),
        embed_scale=float(hf["embedding_multiplier"]),
        logit_divisor=float(hf["logits_scaling"]),
    )


GRANITE = Family(  # dense, with four multipliers
    "GraniteForCausalLM",
    read_granite,
    keys=words("attention_bias mlp_bias"),
    defaults={
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    },
)


def _olmo_layer(hf: Keys, rope: RopeConfig, window: int | None) -> LayerConfig:
    """Norms after mixer and MLP, and of queries and keys over all heads."""
    plain = attention_of(hf, rope, window)
    attention = dataclasses.replace(plain, qk_norm=True, whole_qk_norm=True)
    return LayerConfig(attention, dense_of(hf), norms="after")


def _read_olmo2(hf: Keys) -> ModelConfig:
    return model_of(hf, [_olmo_layer(hf, rope_of(hf), None)] * hf["num_hidden_layers"])


def _read_olmo3(hf: Keys) -> ModelConfig:
    """Windows in three layers of four, of which only the others have a scaled rope."""
    given: Any = hf["rope_parameters"]
    nested = given if isinstance(given, dict) and given.keys() <= {FULL, SLIDING} else {}
    whole = nested.get(FULL) if nested else hf["rope_scaling"] or given
    full = rope_from(hf, whole, hf["rope_theta"])
    sliding = rope_from(hf, nested.get(SLIDING), hf["rope_theta"])
    windows = windows_of_most(hf, 4)
    return model_of(hf, [_olmo_layer(hf, sliding if size else full, size) for size in windows])


_OLMO = {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}
OLMO2 = Family("Olmo2ForCausalLM", _read_olmo2, keys=words("attention_bias"), defaults=_OLMO)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    _read_olmo3,
    keys=words("attention_bias"),
    defaults=_OLMO | {"rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None},
)
