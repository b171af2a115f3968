"""Mellum 2: Qwen3's layers with experts, where layers with windows have a rope of their own."""

import dataclasses
from typing import Any

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import AFTER
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_keys,
    dense_of,
    model_of,
    mtp_of,
    sizes,
)
from jaxspec.models.families.rope import rope_from
from jaxspec.models.families.routed import by_kind, under_either_name
from jaxspec.models.families.windows import FULL, SLIDING, window_of, windows_by_kind
from jaxspec.models.json.values import shown

_MTP_KINDS = {"mtp_layer_types": SLIDING, "mtp_mlp_layer_types": "sparse"}


def _without_null(raw: Keys) -> Keys:
    """The config without null for a number of MTP layers: there are none."""
    count = "num_nextn_predict_layers"
    return {key: value for key, value in raw.items() if key != count or value is not None}


def _attention(hf: Keys, window: int | None) -> AttentionConfig:
    """The attention of a layer with this window, rotated by the parameters of its kind.

    Raises ValueError for parameters that are not those of both kinds.
    """
    given: Any = hf["rope_parameters"]
    if not isinstance(given, dict) or not given.keys() >= {FULL, SLIDING}:
        raise ValueError(f"rope_parameters must have {FULL} and {SLIDING}, got {shown(given)}")
    check_keys(given, frozenset({FULL, SLIDING}), {}, "rope_parameters")
    rope = rope_from(hf, given[SLIDING if window else FULL], hf["rope_theta"])
    return dataclasses.replace(attention_of(hf, rope, window), qk_norm=True)


def _read(hf: Keys) -> ModelConfig:
    """Raises ValueError for MTP layers other than one with a window and experts."""
    for key, kind in _MTP_KINDS.items():
        if hf[key] not in (None, [kind]):
            raise ValueError(f"{key} = {shown(hf[key])} is not supported, only {[kind]!r}")
    routing = RoutingConfig(
        under_either_name(hf, "num_experts", "num_local_experts", 64),
        hf["num_experts_per_tok"],
        normalize=hf["norm_topk_prob"],
    )
    experts, dense = ExpertsConfig(hf["moe_intermediate_size"], routing), dense_of(hf)
    windows = enumerate(windows_by_kind(hf, [FULL] * hf["num_hidden_layers"]))
    has_experts = by_kind(hf)
    layers = [
        LayerConfig(_attention(hf, window), experts if has_experts(index) else dense)
        for index, window in windows
    ]
    mtp = mtp_of(hf, "qwen", AFTER)
    if mtp is not None:
        of_mtp = LayerConfig(_attention(hf, window_of(hf)), experts)
        mtp = dataclasses.replace(mtp, layers=(of_mtp,))
    return dataclasses.replace(model_of(hf, layers), mtp=mtp)


MELLUM = Family(
    "MellumForCausalLM",
    _read,
    defaults=sizes(98304, 2304, 7168, 28, 32, 4, 131072)
    | {"head_dim": 128, "eos_token_id": None, "sliding_window": 1024, "layer_types": None}
    | {"num_experts": None, "num_local_experts": None, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 896, "norm_topk_prob": True, "attention_bias": False}
    | {"mlp_layer_types": None, "first_k_dense_replace": 0}
    | dict.fromkeys(_MTP_KINDS)
    | {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 500_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    rewrite=_without_null,
)
