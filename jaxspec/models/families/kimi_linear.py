"""Kimi Linear: most layers have a delta rule with a decay of each channel, every fourth has latent
attention that does not rotate; experts as DeepSeek-V3's."""

import dataclasses
from types import MappingProxyType
from typing import Any

from jaxspec.config.mixers import LatentConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.recurrent import KimiDeltaConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    check_agrees,
    check_keys,
    dense_of,
    model_of,
    sizes,
)
from jaxspec.models.families.rope import without_rope
from jaxspec.models.families.routed import DEEPSEEK_V3, by_kind, latent_of, sigmoid_experts
from jaxspec.models.families.windows import FULL
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, shown

LINEAR = "linear_attention"
# What files call keys that other families have.
READ_AS = MappingProxyType(
    {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
)
# Inside of ``linear_attn_config``, and what transformers calls the same beside it.
_SIZES = MappingProxyType(
    {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
)
_KINDS = words("kda_layers full_attn_layers")


def _by_common_names(raw: Keys) -> Keys:
    """By the names of other families, with the sizes of ``linear_attn_config`` beside it.

    Raises ValueError for two names that contradict each other, and for unknown keys.
    """
    renamed = dict(raw)
    for key, common in READ_AS.items():
        if key in raw:
            renamed[common] = renamed.pop(key)
            if common in raw:
                check_agrees(raw, common, raw[key], key)
    inside = raw.get("linear_attn_config")
    if inside is None:
        return renamed
    if not isinstance(inside, dict):
        raise ValueError(f"linear_attn_config must be an object, got {shown(inside)}")
    check_keys(inside, _KINDS | _SIZES.keys(), {}, "linear_attn_config")
    return renamed | {beside: inside[key] for key, beside in _SIZES.items() if key in inside}


def _kinds(hf: Keys) -> list[str]:
    """The kind of each layer: by ``layer_types``, or else by lists of layers counted from 1, or
    else every fourth one after the first has attention.

    Raises ValueError for lists that do not give each layer one kind.
    """
    kinds, count, inside = hf["layer_types"], hf["num_hidden_layers"], hf["linear_attn_config"]
    inside = inside if isinstance(inside, dict) else {}
    if kinds is None and inside.keys() >= _KINDS:
        delta, full = inside["kda_layers"], inside["full_attn_layers"]
        lists = isinstance(delta, list) and isinstance(full, list)
        if not lists or not all(map(is_integer, [*delta, *full])):
            raise ValueError("linear_attn_config: kda_layers and full_attn_layers must be lists")
        if sorted([*delta, *full]) != [*range(1, count + 1)]:
            raise ValueError(
                "linear_attn_config: kda_layers and full_attn_layers must have each layer from 1 "
                f"to {count} once"
            )
        return [FULL if index + 1 in full else LINEAR for index in range(count)]
    if kinds is None:
        return [FULL if index and index % 4 == 0 else LINEAR for index in range(count)]
    if not isinstance(kinds, list) or any(kind not in (FULL, LINEAR) for kind in kinds):
        raise ValueError(f"layer_types must be a list of {FULL} and {LINEAR}, got {shown(kinds)}")
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} entries for {count} layers")
    return kinds


def _delta(hf: Keys) -> KimiDeltaConfig:
    for key in _SIZES.values():
        if not is_positive_integer(hf[key]):
            raise ValueError(f"{key} must be a positive integer, got {shown(hf[key])}")
    return KimiDeltaConfig(
        num_heads=hf["linear_num_heads"],
        head_dim=hf["linear_head_dim"],
        taps=hf["linear_conv_kernel_dim"],
    )


def _attention(hf: Keys) -> LatentConfig:
    """Neither ``head_dim`` nor what is said of a rotation is read."""
    plain: dict[str, Any] = {"head_dim": None, "rope_scaling": None, "rope_parameters": None}
    latent = latent_of({**hf, **plain})
    assert latent.rope is not None
    return dataclasses.replace(latent, rope=without_rope(latent.rope))


def _read(hf: Keys) -> ModelConfig:
    delta, attention, dense = _delta(hf), _attention(hf), dense_of(hf)
    experts, has_experts = sigmoid_experts(hf, 256), by_kind(hf)
    layers = [
        LayerConfig(attention if kind == FULL else delta, experts if has_experts(i) else dense)
        for i, kind in enumerate(_kinds(hf))
    ]
    return model_of(hf, layers)


KIMI_LINEAR = Family(
    "KimiLinearForCausalLM",
    _read,
    keys=words("attention_bias") | READ_AS.keys(),
    defaults=dict(DEEPSEEK_V3.defaults)
    | sizes(163840, 2304, 9216, 27, 32, 32, 1048576)
    | {"eos_token_id": 163586, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0}
    | {"q_lora_rank": None, "rope_interleave": False, "moe_intermediate_size": 1024}
    | {"first_k_dense_replace": 1, "mlp_layer_types": None, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 2.446, "layer_types": None, "linear_attn_config": None}
    | {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
    fixed={
        "moe_router_activation_func": (None, "sigmoid"),
        "moe_layer_freq": (None, 1),
        "mla_use_nope": (None, True),
        "use_grouped_topk": (None, True),
        "rope_scaling": (None,),
        "rope_parameters": (None,),
    },
    rewrite=_by_common_names,
    renames=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.mlp|\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.mlp|\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.mlp|\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    ),
)
