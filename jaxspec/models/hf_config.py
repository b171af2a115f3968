"""Hugging Face ``config.json`` to ModelConfig and back, for targets and for EAGLE heads.

Every key of a config must be one that is read here or one known not to change the mathematics. Any
other key, or a value that the decoder cannot honour, is an error that names it. Absent keys take
transformers' defaults.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers  # its config classes are loaded at first use: with torch installed they need it
from huggingface_hub.errors import StrictDataclassError

from jaxspec.config import (
    AttentionConfig,
    DenseConfig,
    LayerConfig,
    Llama3RopeScaling,
    ModelConfig,
    dense_model,
)
from jaxspec.models import hf_keys
from jaxspec.models.heads import EagleMethod, check_capture, default_capture


@dataclasses.dataclass(frozen=True)
class EagleHeadConfig:
    """What ``head_shapes`` needs to know of a draft head; see there for the fields."""

    model: ModelConfig
    method: EagleMethod
    draft_vocab_size: int | None
    capture: tuple[int, ...]
    fc_bias: bool
    own_embed: bool


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if there is none."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a model directory?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def load_model_config(directory: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face model directory."""
    directory = Path(directory)
    generation = directory / "generation_config.json"
    return parse_model_config(
        read_json(directory / "config.json"), read_json(generation) if generation.exists() else None
    )


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """ModelConfig of the contents of ``config.json`` and, if any, ``generation_config.json``.

    Raises ValueError for a model that the decoder would not compute exactly.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in hf_keys.FAMILIES:
        supported = ", ".join(hf_keys.FAMILIES)
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {supported}")
    family = hf_keys.FAMILIES[model_type]
    if (raw.get("architectures") or [family.architecture]) != [family.architecture]:
        raise ValueError(
            f"architectures {raw['architectures']} is not supported for model_type {model_type!r}; "
            f"it must be ['{family.architecture}']"
        )
    fixed = {key: hf_keys.FIXED_VALUES[key] for key in hf_keys.FIXED_VALUES.keys() - family.keys}
    check_keys(raw, hf_keys.COMMON_KEYS | hf_keys.HARMLESS_KEYS | family.keys, fixed, "config.json")
    hf = _normalize(raw)
    rope_theta, rope_scaling = _rope(hf.rope_parameters)
    attention_bias = bool(getattr(hf, "attention_bias", False))
    return dense_model(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=rope_theta,
        max_position=hf.max_position_embeddings,
        sliding_windows=_sliding_windows(hf),
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        stop_token_ids=_stop_token_ids(hf.eos_token_id, (generation or {}).get("eos_token_id")),
    )


def check_keys(
    raw: Mapping[str, Any],
    known: frozenset[str],
    fixed: hf_keys.Allowed,
    where: str,
) -> None:
    """Raise ValueError unless each key is known, or has one of the values it is fixed to."""
    for key, value in raw.items():
        if key in fixed and value not in fixed[key]:
            raise ValueError(
                f"{where}: {key} = {value!r} is not supported, only {fixed[key][-1]!r}"
            )
        if key not in known and key not in fixed:
            raise ValueError(
                f"{where}: unknown key {key!r} (= {value!r}); it may change what the model "
                "computes. Remove it if it does not"
            )


def _normalize(raw: Mapping[str, Any]) -> Any:
    """transformers' config object: defaults filled in, old key names translated."""
    fields = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    for key in ("rope_scaling", "rope_parameters"):  # transformers writes into these
        if isinstance(fields.get(key), dict):
            fields[key] = dict(fields[key])
    try:
        return transformers.AutoConfig.for_model(**fields)
    except (StrictDataclassError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"transformers rejects this config.json: {reason}") from error


def _rope(parameters: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    kind = parameters.get("rope_type", "default")
    if kind not in hf_keys.ROPE_NEEDS:
        raise ValueError(f"rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    needed = hf_keys.ROPE_NEEDS[kind]
    fixed = {"partial_rotary_factor": hf_keys.FIXED_VALUES["partial_rotary_factor"]}
    check_keys(parameters, needed | {"rope_type", "type"}, fixed, f"rope parameters of {kind!r}")
    missing = needed - {key for key, value in parameters.items() if value is not None}
    if missing:
        raise ValueError(f"rope parameters of type {kind!r} lack {', '.join(sorted(missing))}")
    theta = float(parameters["rope_theta"])
    if kind == "default":
        return theta, None
    return theta, Llama3RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
    )


def _sliding_windows(hf: Any) -> tuple[int | None, ...]:
    window = getattr(hf, "sliding_window", None)
    if hf.model_type in ("llama", "mistral"):
        return (window,) * hf.num_hidden_layers
    for kind in set(hf.layer_types):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types: {kind!r} is not supported")
    if "sliding_attention" in hf.layer_types and window is None:
        raise ValueError("layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _stop_token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """The ids of all sources, each once."""
    ids: list[int] = []
    for eos in sources:
        ids += [] if eos is None else eos if isinstance(eos, list) else [eos]
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
    """What all layers have in common, windows apart.

    Raises ValueError for layers that differ in more: no supported family has such.
    """
    kinds = {(dataclasses.replace(layer.mixer, window=None), layer.mlp) for layer in config.layers}
    if len(kinds) != 1:
        raise ValueError("no supported Hugging Face family has layers that differ so")
    return kinds.pop()


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


def with_qkv_bias(layer: LayerConfig, bias: bool) -> LayerConfig:
    """The layer with or without a bias on queries, keys and values."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, qkv_bias=bias))


def eagle_head_config(
    raw: Mapping[str, Any], target: ModelConfig, method: EagleMethod | None = None
) -> EagleHeadConfig:
    """What ``config.json`` of an EAGLE head says, checked against the target it is to draft for.

    ``method``: what the weights are. None: EAGLE-3 if the config says so or has a draft
    vocabulary, else EAGLE-1.
    ``fc_bias`` and ``own_embed`` are the method's defaults where only the weights can tell.

    Raises ValueError for a head that does not fit the target or that is not computed exactly.
    """
    architectures = list(raw.get("architectures") or [])
    if not hf_keys.HEAD_ARCHITECTURES.issuperset(architectures):
        raise ValueError(f"architectures {architectures} is not a supported EAGLE head")
    reduced = raw.get("draft_vocab_size") is not None
    says_eagle3 = reduced or any("Eagle3" in name for name in architectures)
    if method is None:
        method = "eagle3" if says_eagle3 else "eagle1"
    if method == "eagle1" and says_eagle3:
        raise ValueError("the config says EAGLE-3, but the weights are those of an EAGLE-1 head")
    extra = {key: raw[key] for key in hf_keys.HEAD_KEYS if key in raw}
    check_keys(extra, hf_keys.HEAD_KEYS, hf_keys.HEAD_FIXED_VALUES, "config.json of the draft head")
    model = _head_model(raw)
    if "qkv_bias" in extra:
        bias = bool(extra["qkv_bias"])
        model = model.map_layers(lambda layer: with_qkv_bias(layer, bias))
    config = EagleHeadConfig(
        model=model,
        method=method,
        draft_vocab_size=extra.get("draft_vocab_size"),
        capture=_captured_layers(extra, method, target),
        fc_bias=bool(extra.get("bias", method == "eagle1")),
        own_embed=method == "eagle1",
    )
    _check_fit(config, extra, target)
    return config


def _head_model(raw: Mapping[str, Any]) -> ModelConfig:
    """Official heads are Llama layers, whatever ``model_type`` (llama or qwen2) they carry."""
    llama = {key: value for key, value in raw.items() if key not in hf_keys.HEAD_KEYS}
    if llama.get("model_type") == "qwen2" and not llama.get("use_sliding_window"):
        llama = {key: value for key, value in llama.items() if key not in hf_keys.WINDOW_KEYS}
        llama["model_type"] = "llama"
    model = parse_model_config(llama | {"architectures": None})
    return dataclasses.replace(model, tie_word_embeddings=False, stop_token_ids=())


def _captured_layers(
    extra: Mapping[str, Any], method: EagleMethod, target: ModelConfig
) -> tuple[int, ...]:
    """Hidden states the head reads; id ``i`` is the target's residual stream after ``i`` layers.

    ``eagle_aux_hidden_state_layer_ids`` at the top level (speculators, vLLM) counts the same way.
    Inside ``eagle_config`` two conventions are in use: exporters that name the layer whose output
    is taken start at layer 1 (so one is added), the others count as here. This is SGLang's rule
    (pull request 25454). All engines concatenate in the order of the layers.
    """
    nested = dict(extra.get("eagle_config") or {})
    nested_ids = nested.pop("eagle_aux_hidden_state_layer_ids", None) or []
    check_keys(nested, frozenset(), hf_keys.EAGLE_CONFIG_FIXED_VALUES, "eagle_config")
    ids = extra.get("eagle_aux_hidden_state_layer_ids") or [
        layer + (min(nested_ids) == 1) for layer in nested_ids
    ]
    if not ids:
        return default_capture(method, target.num_layers)
    if method == "eagle1":
        raise ValueError("eagle_aux_hidden_state_layer_ids is for EAGLE-3, this is an EAGLE-1 head")
    try:
        return check_capture(ids, target.num_layers)
    except ValueError as error:
        raise ValueError(f"eagle_aux_hidden_state_layer_ids: {error}") from None


def _check_fit(head: EagleHeadConfig, extra: Mapping[str, Any], target: ModelConfig) -> None:
    checks = (
        ("vocab_size", head.model.vocab_size, target.vocab_size),
        ("target_hidden_size", extra.get("target_hidden_size"), target.hidden_size),
        ("num_aux_hidden_states", extra.get("num_aux_hidden_states"), len(head.capture)),
    )
    for name, value, expected in checks:
        if value is not None and value != expected:
            raise ValueError(
                f"the draft head does not fit the target: its {name} is {value}, not {expected}"
            )
    if head.method == "eagle1" and head.model.hidden_size != target.hidden_size:
        raise ValueError(
            f"the draft head does not fit the target: its hidden_size is {head.model.hidden_size}, "
            f"the target's is {target.hidden_size}"
        )
    width = head.draft_vocab_size
    if width is not None and not 0 < width <= target.vocab_size:
        raise ValueError(f"draft_vocab_size {width} is not within 1 .. {target.vocab_size}")
