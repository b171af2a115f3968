"""Llama 4, text: attention in chunks, layers without positions, experts whose input is weighted."""

import dataclasses

from jaxspec.config.experts import ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.rope import QueryScaling, RopeConfig
from jaxspec.models.families.dense import rotating_layers
from jaxspec.models.families.family import Family, Keys, attention_of, model_of, sizes
from jaxspec.models.families.rope import rope_of, without_rope
from jaxspec.models.families.windows import FULL
from jaxspec.models.json.values import (
    check_flag,
    is_integer,
    is_positive_integer,
    is_positive_number,
    shown,
)

CHUNKED = "chunked_attention"


def _chunks(hf: Keys, rotates: list[bool]) -> list[int | None]:
    """The chunk of each layer, by ``layer_types``, or else of all that rotate; None: there are
    none. Raises ValueError for what is no list of the model's layers, and for a bad size."""
    size, kinds = hf["attention_chunk_size"], hf["layer_types"]
    if size is not None and not is_positive_integer(size):
        raise ValueError(f"attention_chunk_size must be a positive integer, got {shown(size)}")
    if kinds is None:
        return [size if rotated else None for rotated in rotates]
    if not isinstance(kinds, list) or any(kind not in (FULL, CHUNKED) for kind in kinds):
        raise ValueError(f"layer_types must be a list of {FULL} and {CHUNKED}, got {shown(kinds)}")
    if len(kinds) != len(rotates):
        raise ValueError(f"layer_types has {len(kinds)} entries for {len(rotates)} layers")
    if CHUNKED in kinds and size is None:
        raise ValueError(f"layer_types has {CHUNKED}, but there is no attention_chunk_size")
    return [size if kind == CHUNKED else None for kind in kinds]


def _has_experts(hf: Keys) -> list[bool]:
    """Whether each layer has experts. Raises ValueError for what is no list of its layers."""
    given, count = hf["moe_layers"], hf["num_hidden_layers"]
    step = hf["interleave_moe_layer_step"]
    if given is None:
        if not is_positive_integer(step):
            raise ValueError(
                f"interleave_moe_layer_step must be a positive integer, got {shown(step)}"
            )
        return [(layer + 1) % step == 0 for layer in range(count)]
    is_list = isinstance(given, list) and all(is_integer(i) and 0 <= i < count for i in given)
    if not is_list:
        raise ValueError(f"moe_layers must be a list of indices below {count}, got {shown(given)}")
    return [layer in given for layer in range(count)]


def _without_positions(hf: Keys, rope: RopeConfig) -> RopeConfig:
    """The rope of layers that do not rotate: queries are multiplied by a factor of their position,
    if the config says so. Raises ValueError for factors that are none."""
    unrotated, tuned = without_rope(rope), hf["attn_temperature_tuning"]
    if not isinstance(tuned, bool | int):  # old files have a number in place of true
        raise ValueError(f"attn_temperature_tuning must be true or false, got {shown(tuned)}")
    if not tuned:
        return unrotated
    if not is_positive_integer(hf["floor_scale"]):
        raise ValueError(f"floor_scale must be a positive integer, got {shown(hf['floor_scale'])}")
    if not is_positive_number(hf["attn_scale"]):
        raise ValueError(f"attn_scale must be a number above 0, got {shown(hf['attn_scale'])}")
    scaling = QueryScaling(float(hf["attn_scale"]), hf["floor_scale"], first=1)
    return dataclasses.replace(unrotated, query_scaling=scaling)


def _read_llama4(hf: Keys) -> ModelConfig:
    rotates = rotating_layers({**hf, "no_rope_layers": hf["no_rope_layers"] or None})
    rope, normed = rope_of(hf), check_flag("use_qk_norm", hf["use_qk_norm"])
    experts = ExpertsConfig(
        hf["intermediate_size"],
        RoutingConfig(hf["num_local_experts"], hf["num_experts_per_tok"], "sigmoid"),
        shared_size=hf["intermediate_size"],
        weighs_input=True,
        names=ExpertNames(router="router", shared="shared_expert"),
        fused="halves",
    )
    dense, unrotated = DenseConfig(hf["intermediate_size_mlp"]), _without_positions(hf, rope)

    def mixer(rotated: bool, chunk: int | None) -> AttentionConfig:
        plain = attention_of(hf, rope if rotated else unrotated)
        return dataclasses.replace(
            plain, interleaved=True, unit_qk_norm=normed and rotated, chunk=chunk
        )

    parts = zip(rotates, _chunks(hf, rotates), _has_experts(hf), strict=True)
    return model_of(
        hf,
        [
            LayerConfig(mixer(rotated, chunk), experts if routed else dense)
            for rotated, chunk, routed in parts
        ],
    )


LLAMA4_TEXT = Family(
    "Llama4ForCausalLM",
    _read_llama4,
    defaults=sizes(202048, 5120, 8192, 48, 40, 8, 131072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    | {"intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1}
    | {"moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True}
    | {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None}
    | {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192}
    | {"attn_scale": 0.1},
    renames=((r"\.feed_forward\.", ".mlp."),),
)
