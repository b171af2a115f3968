"""``config.json`` of Gemma 4's assistants."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config.checks import Problems
from jaxspec.config.layer import LayerConfig
from jaxspec.config.mixers import AttentionConfig, SharedAttentionConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.family import check_code, check_config_keys
from jaxspec.models.families.gemma4 import ASSISTANTS
from jaxspec.models.families.with_images import TEXT
from jaxspec.models.heads.assistant import AssistantConfig, OrderedConfig
from jaxspec.models.json.keys import AROUND_KEYS, FIXED_VALUES, words
from jaxspec.models.json.values import check_flag, is_positive_integer, shown

_KEYS = words(
    f"{TEXT} backbone_hidden_size use_ordered_embeddings num_centroids centroid_intermediate_top_k"
)
_HIDDEN = {"gemma4_assistant": 1536, "gemma4_unified_assistant": 3840}


def says_assistant(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is an assistant's."""
    return raw.get("model_type") in ASSISTANTS


def assistant_config(raw: Mapping[str, Any], target: ModelConfig) -> AssistantConfig:
    """The AssistantConfig of the contents of ``config.json``.

    Raises ValueError for an assistant that does not fit the target, or is not supported.
    """
    kind, text, problems = raw["model_type"], raw.get(TEXT), Problems()
    if not isinstance(text, dict):
        raise ValueError(f"{TEXT} must be an object, got {shown(text)}")
    with problems.caught():
        check_config_keys(raw, AROUND_KEYS | _KEYS, FIXED_VALUES, kind)
    with problems.caught():
        check_code(raw.get("auto_map"), ("Gemma4AssistantForCausalLM",))
    with problems.caught():
        _check_size(raw.get("backbone_hidden_size", _HIDDEN[kind]), target)
    problems.raise_all()
    family = ASSISTANTS[kind]
    model = family.model({"model_type": kind.replace("assistant", "text"), **text})
    with problems.caught():
        if model.vocab_size != target.vocab_size:
            raise ValueError(
                f"vocab_size {model.vocab_size} is not that of the target, {target.vocab_size}"
            )
    sources = []
    for layer in model.layers:
        with problems.caught():
            sources.append(_source(layer, target))
    ordered = None
    with problems.caught():
        ordered = _ordered(raw, model.vocab_size)
    problems.raise_all()
    wider = model.map_layers(_with_positions_of_transformers)
    return AssistantConfig(wider, target.hidden_size, tuple(sources), ordered)


def _check_size(size: Any, target: ModelConfig) -> None:
    if size != target.hidden_size:
        raise ValueError(
            f"backbone_hidden_size {shown(size)} is not the target's hidden_size, "
            f"{target.hidden_size}: the assistant is one of another model"
        )


def _source(layer: LayerConfig, target: ModelConfig) -> int:
    """The target's layer that a layer of the assistant reads: the last one of its kind that has
    keys and values. Raises ValueError if there is none, or if it has other heads."""
    assert isinstance(layer.mixer, SharedAttentionConfig)
    ours = layer.mixer.attention
    kind = "with" if ours.window else "without"
    found = [
        (index, layer.mixer)
        for index, layer in enumerate(target.layers)
        if isinstance(layer.mixer, AttentionConfig)
        and bool(layer.mixer.window) == bool(ours.window)
    ]
    if not found:
        raise ValueError(f"the target has no layer {kind} a window whose keys can be read")
    index, theirs = found[-1]
    if (ours.num_kv_heads, ours.head_dim) != (theirs.num_kv_heads, theirs.head_dim):
        raise ValueError(
            f"layers {kind} a window read {ours.num_kv_heads} KV heads of {ours.head_dim}, and the "
            f"target has {theirs.num_kv_heads} of {theirs.head_dim}"
        )
    return index


def _ordered(raw: Mapping[str, Any], vocab_size: int) -> OrderedConfig | None:
    """Raises ValueError for centroids that do not divide the vocabulary."""
    given = raw.get("use_ordered_embeddings", False)
    check_flag("use_ordered_embeddings", given)
    if not given:
        return None
    count, chosen = raw.get("num_centroids", 2048), raw.get("centroid_intermediate_top_k", 32)
    for name, value in (("num_centroids", count), ("centroid_intermediate_top_k", chosen)):
        if not is_positive_integer(value):
            raise ValueError(f"{name} must be a positive integer, got {shown(value)}")
    if vocab_size % count or chosen > count:
        raise ValueError(
            f"num_centroids {count} must divide vocab_size ({vocab_size}), and be at least "
            f"centroid_intermediate_top_k ({chosen})"
        )
    return OrderedConfig(count, chosen)


def _with_positions_of_transformers(layer: LayerConfig) -> LayerConfig:
    """transformers counts a window from the last key, which is one before the queries' position,
    and sees one key more than the window has."""
    assert isinstance(layer.mixer, SharedAttentionConfig)
    attention = layer.mixer.attention
    if attention.window is None:
        return layer
    attention = dataclasses.replace(attention, window=attention.window + 2)
    return dataclasses.replace(layer, mixer=SharedAttentionConfig(attention, None))
