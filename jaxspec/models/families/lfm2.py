"""LFM2, dense and with experts: most layers are short convolutions between gates, the others
attention."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.recurrent import ShortConvConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_agrees,
    dense_of,
    model_of,
    sizes,
)
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.windows import FULL
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_number, shown

CONV = "conv"
# Keys of older files, and the key that says the same. Those of the first group are read by
# transformers, too.
_READ_INSTEAD = MappingProxyType(
    {
        "block_ff_dim": "intermediate_size",
        "tie_embedding": "tie_word_embeddings",
        "norm_eps": "rms_norm_eps",
    }
)
_SAY_THE_SAME = MappingProxyType(
    {
        "block_dim": "hidden_size",
        "block_norm_eps": "rms_norm_eps",
        "conv_dim": "hidden_size",
        "conv_dim_out": "hidden_size",
        "num_heads": "num_attention_heads",
    }
)


def _by_common_names(raw: Keys) -> Keys:
    """The keys that other families have, by their names there.

    Raises ValueError for two of them that contradict each other.
    """
    renamed = dict(raw)
    for key, common in _READ_INSTEAD.items():
        value = renamed.pop(key, None)
        if value is not None:
            if common in raw:
                check_agrees(raw, common, value, key)
            renamed[common] = value
    return renamed


def _model(hf: Keys, mlp: Callable[[int], DenseConfig | ExpertsConfig]) -> ModelConfig:
    """Layers with the MLP that ``mlp`` gives for their index.

    Raises ValueError for kinds of layers that do not fit, and for keys that contradict each
    other."""
    for key, common in _SAY_THE_SAME.items():
        check_agrees(hf, key, hf[common], common)
    rope = rope_of(hf)
    check_agrees(hf, "theta", rope.theta, "rope_theta")
    attention = dataclasses.replace(attention_of(hf, rope), qk_norm=True)
    convolution = ShortConvConfig(hf["conv_L_cache"], hf["conv_bias"])
    layers = [
        LayerConfig(attention if kind == FULL else convolution, mlp(index))
        for index, kind in enumerate(_kinds(hf))
    ]
    return model_of(hf, layers)


def _read(hf: Keys) -> ModelConfig:
    dense = DenseConfig(_units(hf))
    return _model(hf, lambda _: dense)


def _read_moe(hf: Keys) -> ModelConfig:
    """The first layers are dense. transformers adds 1e-6 to the sum of the chosen scores, which is
    left out here: it is near 1 or above.

    Raises ValueError for a bad number of dense layers, too.
    """
    first = hf["num_dense_layers"]
    if not is_integer(first) or first < 0:
        raise ValueError(f"num_dense_layers must be an integer from 0 on, got {shown(first)}")
    routing = RoutingConfig(
        hf["num_experts"],
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=hf["norm_topk_prob"],
        scale=float(hf["routed_scaling_factor"]),
        correction=hf["use_expert_bias"],
    )
    dense, experts = dense_of(hf), ExpertsConfig(hf["moe_intermediate_size"], routing)
    return _model(hf, lambda index: dense if index < first else experts)


def _kinds(hf: Keys) -> list[str]:
    """The kind of each layer. Raises ValueError for a bad list of them, or of their indices."""
    kinds, indices, layers = hf["layer_types"], hf["full_attn_idxs"], hf["num_hidden_layers"]
    if indices is not None:
        known = isinstance(indices, list) and all(map(is_integer, indices))
        if not known or not all(0 <= index < layers for index in indices):
            raise ValueError(
                f"full_attn_idxs must be a list of indices below {layers}, got {shown(indices)}"
            )
    if kinds is None:
        full = range(layers) if indices is None else indices
        return [FULL if index in full else CONV for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must be a list of {layers} kinds, got {shown(kinds)}")
    for kind in kinds:
        if kind not in (CONV, FULL):
            raise ValueError(f"layer_types: {shown(kind)} is not supported")
    full = [index for index, kind in enumerate(kinds) if kind == FULL]
    if indices is not None and sorted(indices) != full:
        raise ValueError(f"full_attn_idxs {shown(indices)} contradicts layer_types (= {full})")
    return kinds


def _units(hf: Keys) -> int:
    """Units of the MLPs: with ``block_auto_adjust_ff_dim`` two thirds of ``intermediate_size``
    times a factor, rounded up to a multiple. Products are cut to integers as transformers does.

    Raises ValueError for a factor that is no number.
    """
    units, factor = hf["intermediate_size"], hf["block_ffn_dim_multiplier"]
    if not hf["block_auto_adjust_ff_dim"]:
        return units
    units = int(2 * units / 3)
    if factor is None:
        return units
    if not is_positive_number(factor):
        raise ValueError(f"block_ffn_dim_multiplier must be a number above 0, got {shown(factor)}")
    multiple = hf["block_multiple_of"]
    return -(-int(factor * units) // multiple) * multiple


_KEYS = words(  # the second line is of training
    """block_ff_dim tie_embedding norm_eps
    block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init"""
)
_DEFAULTS = MappingProxyType(
    {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True}
    | {"conv_L_cache": 3, "conv_bias": False, "layer_types": None, "full_attn_idxs": None}
    | {"theta": None}
    | dict.fromkeys(_SAY_THE_SAME)
)
_FIXED = MappingProxyType({"block_use_swiglu": (None, True), "use_pos_enc": (None, True)})
_RENAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
    (r"(\.mlp|\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.mlp|\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    (r"(\.mlp|\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
)

LFM2 = Family(
    "Lfm2ForCausalLM",
    _read,
    keys=_KEYS,
    defaults=dict(_DEFAULTS)
    | sizes(65536, 2560, 12288, 32, 32, 8, 128_000)
    | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    | {"block_auto_adjust_ff_dim": True},
    fixed=_FIXED,
    rewrite=_by_common_names,
    renames=_RENAMES,
)
LFM2_MOE = Family(
    "Lfm2MoeForCausalLM",
    _read_moe,
    keys=_KEYS,
    defaults=dict(_DEFAULTS)
    | sizes(65536, 2048, 7168, 32, 32, 8, 128_000)
    | {"num_dense_layers": 2, "moe_intermediate_size": 1792}
    | {"num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True}
    | {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    fixed=_FIXED,
    rewrite=_by_common_names,
    renames=_RENAMES,
)
