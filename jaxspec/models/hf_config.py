"""Hugging Face ``config.json`` to ModelConfig and back. Draft heads are in hf_heads.py.

Every key of a config must be one that is read here or one known not to change the mathematics. Any
other key, or a value that the decoder cannot honour, is an error that names it. Absent keys take
transformers' defaults; its own config classes are not used, as they import torch where it is
installed.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.model import (
    AttentionConfig,
    DenseConfig,
    Llama3RopeScaling,
    ModelConfig,
    dense_model,
)
from jaxspec.config.yarn import YarnRopeScaling
from jaxspec.models import hf_keys
from jaxspec.models.families import glm4_moe, gpt_oss, mixtral, qwen3_moe, yarn
from jaxspec.models.hf_values import (
    check_flag,
    is_integer,
    is_positive_integer,
    is_positive_number,
    naming,
    read_json,
    shown,
)

FAMILIES = {
    **hf_keys.FAMILIES,
    "mixtral": mixtral.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
}
FINISH = {
    "mixtral": mixtral.finish,
    "qwen3_moe": qwen3_moe.finish,
    "glm4_moe": glm4_moe.finish,
    "gpt_oss": gpt_oss.finish,
}
MOST_LAYERS = 1000  # a mistyped number of layers must not fill the host's memory


def load_model_config(directory: str | Path, whose: str = "target") -> ModelConfig:
    """The ModelConfig of a Hugging Face model directory.

    ``whose`` names the model in errors, all ValueErrors that say file and field.
    """
    path, generation = (
        Path(directory) / name for name in ("config.json", "generation_config.json")
    )
    raw = read_json(path)
    with naming(f"{whose}'s {path}"):
        config = parse_model_config(raw)
    if not generation.exists():
        return config
    more = read_json(generation).get("eos_token_id")
    with naming(f"{whose}'s {generation}"):
        stop = config.stop_token_ids + _stop_token_ids(more, config.vocab_size)
    return dataclasses.replace(config, stop_token_ids=tuple(dict.fromkeys(stop)))


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of the contents of ``config.json``.

    Raises ValueError for a model that the decoder would not compute exactly.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        given = shown(model_type)
        raise ValueError(f"model_type {given} is not supported; supported are {supported}")
    family = FAMILIES[model_type]
    if (raw.get("architectures") or [family.architecture]) != [family.architecture]:
        raise ValueError(
            f"architectures {shown(raw['architectures'])} is not supported for model_type "
            f"{model_type!r}; it must be ['{family.architecture}']"
        )
    own = family.keys | (hf_keys.WINDOW_KEYS if _windows_are_off(raw, model_type) else set())
    fixed = {key: hf_keys.FIXED_VALUES[key] for key in hf_keys.FIXED_VALUES.keys() - own}
    check_keys(raw, hf_keys.COMMON_KEYS | hf_keys.HARMLESS_KEYS | own, fixed)
    hf = _with_defaults(raw, family)
    rope_theta, rope_scaling = _rope(_rope_parameters(hf))
    heads, attention_bias = hf["num_attention_heads"], hf["attention_bias"]
    model = dense_model(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf["num_key_value_heads"] or heads,
        head_dim=_head_dim(hf),
        rms_norm_eps=hf["rms_norm_eps"],
        rope_theta=rope_theta,
        max_position=hf["max_position_embeddings"],
        sliding_windows=_sliding_windows(hf, model_type),
        rope_scaling=rope_scaling,
        tie_word_embeddings=hf["tie_word_embeddings"],
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=hf["mlp_bias"],
        qk_norm=model_type in ("qwen3", "qwen3_moe") or hf.get("use_qk_norm", False),
        stop_token_ids=_stop_token_ids(hf["eos_token_id"], hf["vocab_size"]),
    )
    finish = FINISH.get(model_type)
    return model if finish is None else finish(model, hf)


def check_keys(
    raw: Mapping[str, Any],
    known: frozenset[str],
    fixed: hf_keys.Allowed,
    inside: str = "",
) -> None:
    """Raise ValueError unless each key is known, or has one of the values it is fixed to.

    ``inside`` names the object that has the keys, if it is not the whole file.
    """
    where = f"{inside}: " if inside else ""
    for key, value in raw.items():
        if key in fixed and value not in fixed[key]:
            raise ValueError(
                f"{where}{key} = {shown(value)} is not supported, only {fixed[key][-1]!r}"
            )
        if key not in known and key not in fixed:
            raise ValueError(
                f"{where}unknown key {shown(key)} (= {shown(value)}); it may change what the model "
                "computes. Remove it if it does not"
            )


def _windows_are_off(raw: Mapping[str, Any], model_type: str) -> bool:
    """Whether a Llama-type config copied from Qwen's carries sliding-window keys that are not in
    use."""
    unused = raw.get("use_sliding_window") is False or raw.get("sliding_window") is None
    return model_type == "llama" and unused and not raw.get("use_sliding_window")


def _with_defaults(raw: Mapping[str, Any], family: hf_keys.Family) -> dict[str, Any]:
    """The keys that are read, the absent ones filled in. Raises ValueError for values of a type
    that they cannot have."""
    defaults = {**hf_keys.COMMON_DEFAULTS, **family.defaults}
    hf = {key: raw.get(key, default) for key, default in defaults.items()}
    hf |= {key: defaults[key] for key in hf_keys.FLAGS & hf.keys() if hf[key] is None}
    for key, value in hf.items():
        if value is None and defaults[key] is None:
            continue
        if key in hf_keys.SIZES and not is_positive_integer(value):
            raise ValueError(f"{key} must be a positive integer, got {shown(value)}")
        if key in hf_keys.FLAGS:
            check_flag(key, value)
    if hf["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers {hf['num_hidden_layers']} is more than {MOST_LAYERS}")
    if not is_positive_number(hf["rms_norm_eps"]):
        raise ValueError(f"rms_norm_eps must be a number above 0, got {shown(hf['rms_norm_eps'])}")
    return hf


def _head_dim(hf: Mapping[str, Any]) -> int:
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    if hf["head_dim"] is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hf["head_dim"] or hidden // heads


def _rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters as in transformers 5 (``rope_parameters``), from keys of either version."""
    given = hf["rope_scaling"] or hf["rope_parameters"] or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope parameters must be an object, got {shown(given)}")
    kind = given.get("rope_type", given.get("type", "default"))
    parameters = {"rope_theta": hf["rope_theta"]} | given | {"rope_type": kind}
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    return parameters


def _rope(
    parameters: Mapping[str, Any],
) -> tuple[float, Llama3RopeScaling | YarnRopeScaling | None]:
    kind = parameters["rope_type"]
    if kind == "yarn":
        check_keys(parameters, yarn.KEYS, {}, "rope parameters of 'yarn'")
        scaling = yarn.yarn_scaling(parameters)
        return float(parameters["rope_theta"]), scaling
    if not isinstance(kind, str) or kind not in hf_keys.ROPE_NEEDS:
        kinds = "'default', 'llama3' and 'yarn'"
        raise ValueError(f"rope_type {shown(kind)} is not supported, only {kinds}")
    needed = hf_keys.ROPE_NEEDS[kind]
    fixed = {"partial_rotary_factor": hf_keys.FIXED_VALUES["partial_rotary_factor"]}
    check_keys(parameters, needed | {"rope_type", "type"}, fixed, f"rope parameters of {kind!r}")
    missing = needed - {key for key, value in parameters.items() if value is not None}
    if missing:
        raise ValueError(f"rope parameters of type {kind!r} lack {', '.join(sorted(missing))}")
    for key in needed:
        if not is_positive_number(parameters[key]):
            given = shown(parameters[key])
            raise ValueError(f"rope parameter {key} must be a number above 0, got {given}")
    if parameters.get("original_max_position_embeddings", 1) % 1:
        raise ValueError("rope parameter original_max_position_embeddings must be an integer")
    theta = float(parameters["rope_theta"])
    if kind == "default":
        return theta, None
    return theta, Llama3RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
    )


def _sliding_windows(hf: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    layers = hf["num_hidden_layers"]
    always = model_type in ("mistral", "mixtral") or model_type == "qwen3_moe"
    always = always and hf.get("use_sliding_window", True)
    window = hf["sliding_window"] if always or hf["use_sliding_window"] else None
    if window is not None and not is_positive_integer(window):
        raise ValueError(f"sliding_window must be a positive integer, got {shown(window)}")
    if always:
        return (window,) * layers
    first = layers if window is None else hf.get("max_window_layers", 0)
    if not is_integer(first):
        raise ValueError(f"max_window_layers must be an integer, got {shown(first)}")
    kinds = hf["layer_types"]
    if kinds is None and model_type == "gpt_oss":
        kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    if kinds is None:
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types must be a list, got {shown(kinds)}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types: {shown(kind)} is not supported")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _stop_token_ids(eos: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids of an integer, a list of them, or None."""
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(map(is_integer, ids)):
        raise ValueError(f"eos_token_id must be an integer or a list of them, got {shown(eos)}")
    for one in ids:
        if not 0 <= one < vocab_size:
            raise ValueError(
                f"eos_token_id {shown(one)} is no id of a vocabulary of {vocab_size} tokens"
            )
    return tuple(dict.fromkeys(ids))


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """A ``config.json`` that describes ``config``, in keys that every transformers version reads.

    Raises ValueError if none of the supported families has this combination of features.
    """
    stop, (attention, mlp) = list(config.stop_token_ids), _alike(config)
    scaling, model_type = attention.rope.scaling, _family_of(config)
    hf: dict[str, Any] = {
        "architectures": [hf_keys.FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": attention.rope.theta,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": stop[0] if len(stop) == 1 else stop or None,
    }
    if scaling is not None:
        hf["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    hf |= _family_fields(config, model_type)
    if parse_model_config(hf) != config:
        raise ValueError(
            "no supported Hugging Face family has this combination of biases, qk_norm and "
            f"sliding windows: {config}"
        )
    return hf


def _alike(config: ModelConfig) -> tuple[AttentionConfig, DenseConfig]:
    """The configs that all layers share, except for the windows.

    Raises ValueError for layers that differ in more, as in no supported family.
    """
    kinds = {(dataclasses.replace(layer.mixer, window=None), layer.mlp) for layer in config.layers}
    attention, mlp = kinds.pop()
    if kinds or not isinstance(mlp, DenseConfig):
        raise ValueError("no supported Hugging Face family has layers that differ in this way")
    return attention, mlp


def _windows(config: ModelConfig) -> list[int | None]:
    return [layer.mixer.window for layer in config.layers]


def _family_of(config: ModelConfig) -> str:
    attention, _ = _alike(config)
    if attention.qk_norm:
        return "qwen3"
    if attention.qkv_bias and not attention.o_bias:
        return "qwen2"
    return "mistral" if any(_windows(config)) else "llama"


def _family_fields(config: ModelConfig, model_type: str) -> dict[str, Any]:
    windows, (attention, mlp) = _windows(config), _alike(config)
    window = next((size for size in windows if size), None)
    if model_type == "llama":
        return {"attention_bias": attention.qkv_bias, "mlp_bias": mlp.bias}
    if model_type == "mistral":
        return {"sliding_window": window}
    fields = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if size else "full_attention" for size in windows],
    }
    return fields if model_type == "qwen2" else fields | {"attention_bias": attention.qkv_bias}
