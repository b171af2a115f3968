"""Gemma 4 (text): layers with a window, and full ones with wider heads.

Norms multiply by w. Values are normed, scores are not scaled, and the residual stream after each
layer is multiplied by a number. Of large models the values of full layers are their keys. In the E
models the last layers read keys and values of others, and all layers read embeddings of their own.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxspec.config.experts import ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import AttentionConfig, MixerConfig, SharedAttentionConfig
from jaxspec.config.mlps import DenseAndExpertsConfig, DenseConfig, MlpConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    check_agrees,
    check_keys,
    check_multiple,
    model_of,
    sizes,
)
from jaxspec.models.families.rope import PARTIAL, rope_from
from jaxspec.models.families.windows import FULL, SLIDING, windows_by_kind
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, shown

_PER_LAYER = "per_layer_config"
_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, PARTIAL: 0.25},
}


class _Heads(NamedTuple):
    """KV heads of a kind of layer, and how wide its heads are."""

    kv_heads: int
    width: int


def _kinds(hf: Keys) -> list[str]:
    """The kind of each layer. Raises ValueError unless the last one is full, as in transformers."""
    count, given = hf["num_hidden_layers"], hf["layer_types"]
    default = [FULL if i % 6 == 0 else SLIDING for i in range(1, count)] + [FULL]
    kinds = default if given is None else given
    windows_by_kind(hf, kinds)  # they are checked
    if kinds[-1] != FULL:
        raise ValueError(f"layer_types must end with {FULL}, got {shown(kinds[-1])}")
    return kinds


def _heads_by_kind(hf: Keys, kinds: list[str]) -> dict[str, _Heads]:
    """Published files have the heads of full layers in keys of their own, and those that
    transformers saves in ``per_layer_config``. Raises ValueError for files that contradict
    themselves."""
    sliding = _Heads(hf["num_key_value_heads"], hf["head_dim"])
    groups = hf["num_global_key_value_heads"] if hf["attention_k_eq_v"] else None
    full = _Heads(groups or sliding.kv_heads, hf["global_head_dim"] or 512)
    if hf[_PER_LAYER] is not None:
        full = _saved_heads(hf, kinds, sliding)
        check_agrees(hf, "global_head_dim", full.width, f"head_dim of {_PER_LAYER}")
        if groups is not None and groups != full.kv_heads:
            raise ValueError(
                f"num_global_key_value_heads = {groups} contradicts num_key_value_heads of "
                f"{_PER_LAYER} (= {full.kv_heads}); correct one of them"
            )
    for kv_heads in (sliding.kv_heads, full.kv_heads):
        if hf["num_attention_heads"] % kv_heads:
            check_multiple(hf, "num_attention_heads", "num_global_key_value_heads")
            raise ValueError(
                f"num_attention_heads ({hf['num_attention_heads']}) must be a multiple of the KV "
                f"heads of {_PER_LAYER} ({kv_heads})"
            )
    return {SLIDING: sliding, FULL: full}


def _saved_heads(hf: Keys, kinds: list[str], sliding: _Heads) -> _Heads:
    """Those of full layers in ``per_layer_config``. Raises ValueError unless they are alike, and
    other layers have none of their own."""
    given: Any = hf[_PER_LAYER]
    full = {index for index, kind in enumerate(kinds) if kind == FULL}
    if not isinstance(given, dict) or not all(isinstance(layer, dict) for layer in given.values()):
        raise ValueError(f"{_PER_LAYER} must be an object of objects, got {shown(given)}")
    # transformers writes numbers of layers with leading zeros.
    layers = {int(key) if str(key).isdecimal() else key: given[key] for key in given}
    if others := [key for key in layers if key not in full]:
        raise ValueError(f"{_PER_LAYER} may have layers of {FULL} only, got {shown(others)}")
    each = [layers.get(index, {}) for index in sorted(full)]
    if any(layer != each[0] for layer in each):
        raise ValueError(f"{_PER_LAYER}: layers of {FULL} must be alike, got {shown(given)}")
    names = words("head_dim num_key_value_heads")
    check_keys(each[0], names, {}, _PER_LAYER)
    for name, value in each[0].items():
        if not is_positive_integer(value):
            raise ValueError(f"{_PER_LAYER}: {name} must be a positive integer, got {shown(value)}")
    kv_heads = each[0].get("num_key_value_heads", sliding.kv_heads)
    return _Heads(kv_heads, each[0].get("head_dim", sliding.width))


def _ropes(hf: Keys, heads: dict[str, _Heads]) -> dict[str, RopeConfig]:
    given: Any = _ROPES if hf["rope_parameters"] is None else hf["rope_parameters"]
    if isinstance(given, dict):
        check_keys(given, frozenset({FULL, SLIDING}), {}, "rope_parameters")
    if not isinstance(given, dict) or len(given) != 2:
        raise ValueError(f"rope_parameters must have {FULL} and {SLIDING}, got {shown(given)}")
    return {
        kind: rope_from(
            {**hf, "head_dim": heads[kind].width, PARTIAL: None}, given[kind], hf["rope_theta"]
        )
        for kind in (SLIDING, FULL)
    }


def _sources(hf: Keys, kinds: list[str]) -> list[int | None]:
    """For each layer the one whose keys and values it reads: of the last layers, the last layer of
    their kind before these. Raises ValueError where there is none."""
    shared = hf["num_kv_shared_layers"]
    if not is_integer(shared) or not 0 <= shared < len(kinds):
        raise ValueError(
            f"num_kv_shared_layers must be 0 or more, and below num_hidden_layers ({len(kinds)}), "
            f"got {shown(shared)}"
        )
    first = len(kinds) - shared
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    if missing := {*kinds} - {*last}:
        raise ValueError(
            f"num_kv_shared_layers = {shared} leaves no layer of {missing.pop()} with keys"
        )
    return [None if index < first else last[kind] for index, kind in enumerate(kinds)]


def _token_input(hf: Keys) -> int:
    """Entries of per-layer embeddings. Raises ValueError for what is no number of them."""
    width = hf["hidden_size_per_layer_input"] or 0
    if not is_integer(width) or width < 0:
        raise ValueError(
            f"hidden_size_per_layer_input must be 0 or a positive integer, got {shown(width)}"
        )
    if width:
        check_agrees(hf, "vocab_size_per_layer_input", hf["vocab_size"], "vocab_size")
    return width


def _mlp(hf: Keys, *, shares: bool) -> MlpConfig:
    """``shares``: of a layer without keys and values of its own. Raises ValueError for experts of
    which a size is not given."""
    size = hf["intermediate_size"] * (2 if shares and hf["use_double_wide_mlp"] else 1)
    dense = DenseConfig(size, activation="gelu_tanh")
    if not hf["enable_moe_block"]:
        return dense
    if missing := [key for key in _EXPERTS if hf[key] is None]:
        raise ValueError(f"enable_moe_block needs {', '.join(missing)}")
    experts = ExpertsConfig(
        hf["moe_intermediate_size"],
        RoutingConfig(hf["num_experts"], hf["top_k_experts"], normalize=True),
        activation="gelu_tanh",
        names=ExpertNames(block="moe", router="router.proj"),
        fused="stacked",
    )
    return DenseAndExpertsConfig(dense, experts)


def _mixers(hf: Keys, kinds: list[str]) -> dict[str, AttentionConfig]:
    """The attention of both kinds of layers, with keys and values of its own."""
    heads = _heads_by_kind(hf, kinds)
    ropes, bias = _ropes(hf, heads), hf["attention_bias"]

    def attention(kind: str) -> AttentionConfig:
        return AttentionConfig(
            hf["num_attention_heads"],
            heads[kind].kv_heads,
            ropes[kind],
            hf["sliding_window"] if kind == SLIDING else None,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            scale=1.0,
            value_norm=True,
            values_are_keys=hf["attention_k_eq_v"] and kind == FULL,
        )

    return {kind: attention(kind) for kind in (SLIDING, FULL)}


def _layer(mixer: MixerConfig, mlp: MlpConfig, token_input: int = 0) -> LayerConfig:
    return LayerConfig(mixer, mlp, "both", rescaled=True, token_input=token_input)


def _read(hf: Keys) -> ModelConfig:
    kinds = _kinds(hf)
    mixers, width = _mixers(hf, kinds), _token_input(hf)

    def layer(kind: str, source: int | None) -> LayerConfig:
        mlp = _mlp(hf, shares=source is not None)
        if source is None:
            return _layer(mixers[kind], mlp, width)
        return _layer(SharedAttentionConfig(mixers[kind], source), mlp, width)

    model = model_of(hf, map(layer, kinds, _sources(hf, kinds)))
    cap = hf["final_logit_softcapping"]
    return dataclasses.replace(model, embed_scale=math.sqrt(hf["hidden_size"]), logit_softcap=cap)


def _read_assistant(hf: Keys) -> ModelConfig:
    """The layers of a drafter, all of which read keys and values of the target."""
    kinds = _kinds(hf)
    shared = hf["num_kv_shared_layers"]
    if shared not in (0, len(kinds)):
        raise ValueError(
            f"num_kv_shared_layers must be that of all layers ({len(kinds)}), got {shown(shared)}"
        )
    mixers, mlp = _mixers(hf, kinds), _mlp(hf, shares=True)
    layers = (_layer(SharedAttentionConfig(mixers[kind], None), mlp) for kind in kinds)
    return model_of(hf, layers)


_DEFAULTS = {
    **sizes(262_144, 2304, 9216, 30, 8, 4, 131_072),
    **{"head_dim": 256, "global_head_dim": None, "num_global_key_value_heads": None},
    **{"tie_word_embeddings": True, "eos_token_id": 1, "attention_k_eq_v": False},
    **{"sliding_window": 512, "layer_types": None, "final_logit_softcapping": None},
    **{"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    **{"vocab_size_per_layer_input": None, "hidden_size_per_layer_input": 256},
    **{_PER_LAYER: None, "enable_moe_block": False, **dict.fromkeys(_EXPERTS)},
}
_FIXED = {
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (None, "vision"),  # of images; a text is causal
    # transformers reads rope_parameters alone.
    "rope_theta": (None,),
    "rope_scaling": (None,),
}
GEMMA4_TEXT = Family(
    "Gemma4ForCausalLM",
    _read,
    keys=words("attention_bias"),
    defaults=_DEFAULTS,
    fixed=_FIXED,
    renames=((r"(\.layers\.\d+\.)(experts|router)\.", r"\1moe.\2."),),
)
GEMMA4_UNIFIED_TEXT = dataclasses.replace(
    GEMMA4_TEXT,
    architecture="Gemma4UnifiedForCausalLM",
    defaults=_DEFAULTS
    | {"max_position_embeddings": 262_144, "sliding_window": 1024}
    | {"hidden_size_per_layer_input": 0},
)
GEMMA4 = WithImages(
    "Gemma4ForConditionalGeneration",
    {"gemma4_text": GEMMA4_TEXT},
    defaults={"tie_word_embeddings": True},
)
GEMMA4_UNIFIED = WithImages(
    "Gemma4UnifiedForConditionalGeneration",
    {"gemma4_unified_text": GEMMA4_UNIFIED_TEXT},
    defaults={"tie_word_embeddings": True},
)
# The text models of assistants, which draft for the others (see models/from_config/assistant.py).
_OF_ASSISTANTS = {
    "hidden_size_per_layer_input": (0,),
    "vocab_size_per_layer_input": (0,),
    "use_double_wide_mlp": (False,),
    "enable_moe_block": (False,),
    "final_logit_softcapping": (None,),  # transformers does not cap their logits
}
ASSISTANTS = {
    "gemma4_assistant": dataclasses.replace(
        GEMMA4_TEXT, read=_read_assistant, fixed=_FIXED | _OF_ASSISTANTS
    ),
    "gemma4_unified_assistant": dataclasses.replace(
        GEMMA4_UNIFIED_TEXT, read=_read_assistant, fixed=_FIXED | _OF_ASSISTANTS
    ),
}
