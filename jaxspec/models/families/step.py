"""Step 3.5, and the text model of Step 3.7: experts, windows, and heads with gates.

Layers differ in their number of heads, rope, MLP and limits of the activation. Published files say
so in lists with an entry for each layer, those for multi-token prediction (MTP) behind the others;
transformers saves most of it by kind of layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.config.experts import ExpertsConfig, LimitedSwiglu, RoutingConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import BEFORE
from jaxspec.config.rope import RopeConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    check_agrees,
    check_keys,
    model_of,
    mtp_of,
    sizes,
)
from jaxspec.models.families.rope import PARTIAL, rope_from
from jaxspec.models.families.windows import FULL, SLIDING, window_of
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_integer, is_positive_number, shown

# Two names of one key: that of published files, and that of ``read``.
_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
_OTHER = "attention_other_setting"  # heads of layers with a window
_SPARSE = "moe_layers_enum"
_SHARES = "partial_rotary_factors"


def _by_their_names(raw: Keys) -> Keys:
    """The keys of a file, each by one name. Raises ValueError for two values of one."""
    found = {key: value for key, value in raw.items() if key not in _NAMES}
    for name, key in _NAMES.items():
        if name in raw and found.setdefault(key, raw[name]) != raw[name]:
            raise ValueError(
                f"{name} = {shown(raw[name])} contradicts {key} (= {shown(found[key])})"
            )
    return found


def _entries(hf: Keys, key: str, of_mtp: str | None = None) -> list[Any] | None:
    """A list with an entry for each layer, and perhaps for MTP layers behind them, which may stand
    under another key; None: the file has no such list. Raises ValueError for a shorter one."""
    values, count = hf[key], hf["num_hidden_layers"]
    if values is None:
        return None
    more = (hf[of_mtp] if of_mtp else None) or []
    for name, value in ((key, values), (of_mtp, more)):
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {shown(value)}")
    if len(values) < count:
        raise ValueError(f"{key} has {len(values)} entries for {count} layers")
    return values + more


def _kinds(hf: Keys) -> list[str]:
    """The kind of each layer, and of MTP layers that the file describes. Raises ValueError for an
    unknown one."""
    kinds = _entries(hf, "layer_types", "mtp_layer_types")
    if kinds is None:
        return [FULL] * hf["num_hidden_layers"]
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ValueError(f"layer_types: {shown(kind)} is not supported")
    return kinds


def _have_experts(hf: Keys, count: int) -> Callable[[int], bool]:
    """Which layers have experts, of ``count`` with MTP layers. Raises ValueError for no list of
    layers."""
    kinds = _entries(hf, "mlp_layer_types", "mtp_mlp_layer_types")
    if kinds is not None:
        if any(kind not in ("dense", "sparse") for kind in kinds):
            raise ValueError(f"mlp_layer_types must be of dense and sparse, got {shown(kinds)}")
        return lambda index: kinds[index : index + 1] == ["sparse"]
    given = hf[_SPARSE]
    if given is None:
        return lambda index: 3 <= index < hf["num_hidden_layers"]
    numbers = given.split(",") if isinstance(given, str) else given
    if not isinstance(numbers, list) or not all(str(i).strip().isdecimal() for i in numbers):
        raise ValueError(f"{_SPARSE} must be numbers of layers, got {shown(given)}")
    layers = {int(i) for i in numbers}
    if others := [i for i in layers if i >= count]:
        raise ValueError(f"{_SPARSE} has {shown(others)}, and the model {count} layers")
    return lambda index: index in layers


def _sliding_heads(hf: Keys, kinds: list[str]) -> int:
    """Query heads of layers with a window. Raises ValueError if these differ in more from the
    others."""
    other = {} if hf[_OTHER] is None else hf[_OTHER]
    if not isinstance(other, dict):
        raise ValueError(f"{_OTHER} must be an object, got {shown(other)}")
    alike = {
        "attention_type": (None, SLIDING),
        "num_attention_groups": (None, hf["num_key_value_heads"]),
        "head_dim": (None, hf["head_dim"]),
        "true_head_dim": (None, hf["head_dim"]),
    }
    check_keys(other, words("num_attention_heads"), alike, _OTHER)
    given = [hf["num_sliding_attention_heads"], other.get("num_attention_heads")]
    given = [heads for heads in given if heads is not None] or [hf["num_attention_heads"]]
    heads, groups = given[0], hf["num_key_value_heads"] or 1
    if any(other != heads for other in given) or not is_positive_integer(heads) or heads % groups:
        raise ValueError(
            f"{_OTHER}: num_attention_heads must be a multiple of num_key_value_heads ({groups}), "
            f"and num_sliding_attention_heads the same, got {shown(given)}"
        )
    layers = (str(i) for i in range(hf["num_hidden_layers"]) if kinds[i] == SLIDING)
    saved = {layer: {"num_attention_heads": heads} for layer in layers}
    if heads != hf["num_attention_heads"] or hf["per_layer_config"] != {}:
        check_agrees(hf, "per_layer_config", saved, "the heads of sliding layers")
    return heads


def limit_of(hf: Keys, key: str, index: int) -> LimitedSwiglu | None:
    """The limits of a layer's activation. Raises ValueError for what is no number from 0 on."""
    value = (_entries(hf, key) or [])[index : index + 1] or [0]
    if value[0] in (None, 0):
        return None
    if not is_positive_number(value[0]):
        raise ValueError(f"{key} must have numbers from 0 on, got {shown(value[0])}")
    return LimitedSwiglu(float(value[0]))


def _rope(hf: Keys, kind: str, index: int) -> RopeConfig:
    """The rope of a layer, which is scaled where it has no window. Raises ValueError as
    rope_from."""
    keys, given = {**hf, PARTIAL: None}, hf["rope_parameters"]
    if isinstance(given, dict) and given.keys() & {FULL, SLIDING}:
        if kind not in given or given.keys() - {FULL, SLIDING}:
            raise ValueError(f"rope_parameters must have {FULL} and {SLIDING}, got {shown(given)}")
        if isinstance(hf["rope_theta"], list):
            raise ValueError("rope_theta is a list, and rope_parameters are by kind: remove one")
        return rope_from(keys, given[kind], hf["rope_theta"])
    theta, shares = hf["rope_theta"], _entries(hf, _SHARES)
    if isinstance(theta, list):
        theta = theta[index]
    scaling = (hf["rope_scaling"] or given) if kind == FULL else None
    return rope_from(keys, scaling, theta, {} if shares is None else {PARTIAL: shares[index]})


def _attention(hf: Keys, kinds: list[str]) -> list[AttentionConfig]:
    """The attention of each layer that all lists describe."""
    heads, window, scalar = _sliding_heads(hf, kinds), window_of(hf), hf["query_pre_attn_scalar"]
    if SLIDING in kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but no sliding_window is in use")
    thetas = _entries(hf, "rope_theta") if isinstance(hf["rope_theta"], list) else None
    lists = (kinds, thetas, _entries(hf, _SHARES))
    described = min(len(entries) for entries in lists if entries is not None)
    full = AttentionConfig(
        hf["num_attention_heads"],
        hf["num_key_value_heads"],
        _rope(hf, kinds[0], 0),
        qk_norm=True,
        gate="heads",
        scale=None if scalar in (None, hf["head_dim"]) else scalar**-0.5,
    )
    sliding = dataclasses.replace(full, num_heads=heads, window=window)
    return [
        dataclasses.replace(sliding if kind == SLIDING else full, rope=_rope(hf, kind, index))
        for index, kind in enumerate(kinds[:described])
    ]


def _read(hf: Keys) -> ModelConfig:
    check_agrees(hf, "max_seq_len", hf["max_position_embeddings"], "max_position_embeddings")
    routing = RoutingConfig(
        hf["n_routed_experts"],
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=True,
        scale=float(hf["moe_router_scaling_factor"]),
        correction=True,
    )
    count = hf["num_hidden_layers"]
    mtp = mtp_of(hf, "deepseek", BEFORE)  # as step3p5_mtp.py of vLLM
    have_experts = _have_experts(hf, count + (mtp.num_layers if mtp else 0))

    def mlp(index: int) -> DenseConfig | ExpertsConfig:
        shared = limit_of(hf, "swiglu_limits_shared", index)
        if not have_experts(index):  # the limits are those of a shared expert
            return DenseConfig(hf["intermediate_size"], activation=shared or "silu")
        return ExpertsConfig(
            hf["moe_intermediate_size"],
            routing,
            shared_size=hf["share_expert_dim"],
            activation=limit_of(hf, "swiglu_limits", index),
            shared_activation=shared,
            fused="stacked",
        )

    mixers = enumerate(_attention(hf, _kinds(hf)))
    layers = [LayerConfig(mixer, mlp(index)) for index, mixer in mixers]
    model = model_of(hf, layers[:count], norm_offset=1)
    if mtp is not None:
        described = tuple(layers[count : count + mtp.num_layers])
        if len(described) not in (0, mtp.num_layers):
            raise ValueError(f"layer_types has {len(described)} of {mtp.num_layers} MTP layers")
        mtp = dataclasses.replace(mtp, layers=described, own_heads=True)
    return dataclasses.replace(model, mtp=mtp)


STEP3P5 = Family(
    "Step3p5ForCausalLM",
    _read,
    keys=frozenset(_NAMES),
    defaults=sizes(128815, 4096, 11264, 45, 64, 8, 128000)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": None, "max_seq_len": None}
    | {"n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280}
    | {"share_expert_dim": 1280, "moe_router_scaling_factor": 1.0, "query_pre_attn_scalar": None}
    | {"layer_types": None, "mlp_layer_types": None, "sliding_window": None, _SPARSE: None}
    | {"mtp_layer_types": None, "mtp_mlp_layer_types": None, "per_layer_config": None}
    | {"num_sliding_attention_heads": None, _OTHER: None, _SHARES: None}
    | {"swiglu_limits": None, "swiglu_limits_shared": None},
    fixed={
        "att_impl_type": (None, "GQA"),
        "moe_every_n_layer": (None, 1),
        "moe_layer_offset": (None, 0),
        "moe_router_activation": (None, "sigmoid"),
        "need_fp32_gate": (None, True),
        "norm_expert_weight": (None, True),
        "sink": (None, False),
        "use_bidirectional_attention": (None, False),
        "use_head_wise_attn_gate": (None, True),
        "use_mfa": (None, False),
        "use_moe": (None, True),
        "use_moe_router_bias": (None, True),
        "use_qk_norm": (None, True),
        "use_rope_layers": (None, []),
        "yarn_only_types": (None, [FULL]),
        "zero_centered": (None, True),
    },
    rewrite=_by_their_names,
    renames=(
        (r"\.moe\.router_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.moe\.(gate|up|down)_proj\.weight$", r".mlp.experts.\1_proj"),
        (r"\.moe\.", ".mlp."),
        (r"\.share_expert\.", ".mlp.shared_experts."),
        (r"\.transformer\.shared_head\.output\.", ".shared_head.head."),
        (r"\.transformer\.shared_head\.", ".shared_head."),
    ),
)
STEP3P7 = WithImages("Step3p7ForConditionalGeneration", {"step3p5": STEP3P5})
