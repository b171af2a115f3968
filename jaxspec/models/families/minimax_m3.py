"""MiniMax M3: attention to blocks of positions that index heads choose, experts and MLPs with the
activation of gpt-oss."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

from jaxspec.config.blocks import BlockIndexConfig
from jaxspec.config.experts import ClampedSwiglu, ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import AttentionConfig, BlockSparseConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import AFTER_BEFORE
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_agrees,
    check_keys,
    model_of,
    mtp_of,
    sizes,
)
from jaxspec.models.families.rope import PARAMETERS, PARTIAL, rope_of
from jaxspec.models.families.windows import FULL
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_integer, shown

SPARSE = "minimax_m3_sparse"  # what transformers calls such layers
_ATTENTION, _EVERY_MLP, _MTP = "sparse_attention_config", "moe_layer_freq", "num_mtp_modules"
# Inside of ``sparse_attention_config``, and what transformers calls the same beside it.
_BESIDE = MappingProxyType(
    {
        "sparse_num_index_heads": "index_n_heads",
        "sparse_index_dim": "index_head_dim",
        "sparse_block_size": "index_block_size",
        "sparse_topk_blocks": "index_topk_blocks",
        "sparse_local_block": "index_local_blocks",
    }
)
_CHOOSES, _WITHOUT_VALUES = "sparse_attention_freq", "sparse_disable_index_value"
_SIZES = words("dense_intermediate_size shared_intermediate_size rotary_dim") | frozenset(
    _BESIDE.values()
)


def _said_beside(raw: Keys) -> Keys:
    """With what ``sparse_attention_config`` says beside it, and ``moe_layer_freq`` as
    ``mlp_layer_types``.

    Raises ValueError for what contradicts itself, and for index heads that have values.
    """
    told, inside = {**raw}, raw.get(_ATTENTION)
    if inside is not None:
        if not isinstance(inside, dict):
            raise ValueError(f"{_ATTENTION} must be an object, got {shown(inside)}")
        known = frozenset([*_BESIDE, _CHOOSES, _WITHOUT_VALUES])
        fixed = {"sparse_init_block": (None, 0), "sparse_score_type": (None, "max")}
        check_keys(inside, known, {**fixed, "use_sparse_attention": (True,)}, _ATTENTION)
        given = {beside: inside[key] for key, beside in _BESIDE.items() if key in inside}
        told |= _unless_said(raw, given, _ATTENTION)
        if _CHOOSES in inside:
            sparse = _flags(inside[_CHOOSES], f"{_ATTENTION}: {_CHOOSES}")
            _check_without_values(inside, sparse)
            kinds = [SPARSE if flag else FULL for flag in sparse]
            told |= _unless_said(raw, {"layer_types": kinds}, _ATTENTION)
    if raw.get(_EVERY_MLP) is not None:
        kinds = ["sparse" if flag else "dense" for flag in _flags(raw[_EVERY_MLP], _EVERY_MLP)]
        told |= _unless_said(raw, {"mlp_layer_types": kinds}, _EVERY_MLP)
    _check_rotated(raw)
    return told


def _unless_said(raw: Keys, given: Keys, where: str) -> Keys:
    """``given``, whose keys stand beside ``where``, too, or are absent there."""
    for key, value in given.items():
        check_agrees({key: None, **raw}, key, value, where)
    return given


def _flags(given: object, name: str) -> list[bool]:
    if not isinstance(given, list) or any(flag not in (0, 1) for flag in given):
        raise ValueError(f"{name} must be a list of 0 and 1, got {shown(given)}")
    return [flag == 1 for flag in given]


def _check_without_values(inside: Keys, sparse: Sequence[bool]) -> None:
    """Raise ValueError for a layer whose index heads have values, which no file has weights of."""
    if inside.get(_WITHOUT_VALUES) is None:
        return
    without = _flags(inside[_WITHOUT_VALUES], f"{_ATTENTION}: {_WITHOUT_VALUES}")
    if len(without) != len(sparse) or any(
        chooses and not only for chooses, only in zip(sparse, without, strict=True)
    ):
        raise ValueError(
            f"{_ATTENTION}: {_WITHOUT_VALUES} must be 1 where {_CHOOSES} is, got {shown(without)}"
        )


def _check_rotated(raw: Keys) -> None:
    """Raise ValueError unless ``rotary_dim`` is the share of a head that is rotated, which stands
    beside it or in the rope parameters. transformers reads that share alone, others the former."""
    rotary, width = raw.get("rotary_dim"), raw.get("head_dim", 128)
    if rotary is None or not is_positive_integer(rotary) or not is_positive_integer(width):
        return  # else it is an error of _read
    inside = [raw[key] for key in PARAMETERS if isinstance(raw.get(key), dict)]
    shares = {place[PARTIAL] for place in (raw, *inside) if place.get(PARTIAL) is not None}
    for share in shares or {1.0}:
        if share != rotary / width:
            raise ValueError(
                f"rotary_dim = {rotary} of head_dim {width} contradicts {PARTIAL} "
                f"({shown(share) if shares else 'absent: whole heads are rotated'}); set "
                f"{PARTIAL} to {rotary / width} if that is meant"
            )


def _kinds(hf: Keys, name: str, allowed: Sequence[str], absent: str) -> list[str]:
    """The kind of each layer. Raises ValueError for what is no list of the model's layers."""
    given, count = hf[name], hf["num_hidden_layers"]
    if given is None:
        return [absent] * count
    if not isinstance(given, list) or any(kind not in allowed for kind in given):
        raise ValueError(f"{name} must be a list of {' and '.join(allowed)}, got {shown(given)}")
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} layers")
    return given


def _sparse(hf: Keys, attention: AttentionConfig) -> BlockSparseConfig:
    """Raises ValueError for another number of index heads than of KV heads."""
    heads = attention.num_kv_heads
    if hf["index_n_heads"] != heads:
        raise ValueError(
            f"index_n_heads = {hf['index_n_heads']} is not supported, only num_key_value_heads "
            f"({heads}): each KV head has one"
        )
    index = BlockIndexConfig(
        hf["index_head_dim"],
        hf["index_block_size"],
        hf["index_topk_blocks"],
        hf["index_local_blocks"],
    )
    return BlockSparseConfig(attention, index)


def _experts(hf: Keys, activation: ClampedSwiglu) -> ExpertsConfig:
    routing = RoutingConfig(
        hf["num_local_experts"],
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=True,
        scale=float(hf["routed_scaling_factor"]),
        correction=True,
    )
    return ExpertsConfig(
        hf["intermediate_size"],
        routing,
        hf["shared_intermediate_size"],
        activation=activation,
        shared_activation=activation,
        names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )


def _read(hf: Keys) -> ModelConfig:
    for name in sorted(_SIZES):
        if not is_positive_integer(hf[name]):
            raise ValueError(f"{name} must be a positive integer, got {shown(hf[name])}")
    check_agrees(hf, "moe_intermediate_size", hf["intermediate_size"], "intermediate_size")
    mixers = _kinds(hf, "layer_types", (FULL, SPARSE), FULL)
    mlps = _kinds(hf, "mlp_layer_types", ("dense", "sparse"), "sparse")
    first = next((index for index, kind in enumerate(mlps) if kind == "sparse"), len(mlps))
    check_agrees(hf, "first_k_dense_replace", first, "the kinds of MLPs")
    activation = ClampedSwiglu(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"]))
    attention = dataclasses.replace(attention_of(hf, rope_of(hf)), qk_norm=True)
    dense = DenseConfig(hf["dense_intermediate_size"], activation=activation)
    experts, key = _experts(hf, activation), None if hf[_MTP] is None else _MTP
    mtp = mtp_of(hf, "minimax_m3", AFTER_BEFORE, key=key)
    layers = [
        LayerConfig(
            _sparse(hf, attention) if mixer == SPARSE else attention,
            experts if mlp == "sparse" else dense,
        )
        for mixer, mlp in zip(mixers, mlps, strict=True)
    ]
    if mtp is not None:
        drafting = LayerConfig(_sparse(hf, attention), experts)
        mtp = dataclasses.replace(mtp, layers=(drafting,) * mtp.num_layers)
    return dataclasses.replace(model_of(hf, layers, norm_offset=1), mtp=mtp)


MINIMAX_M3_TEXT = Family(
    "MiniMaxM3VLForCausalLM",
    _read,
    keys=words(f"{_ATTENTION} {_EVERY_MLP}"),
    defaults=sizes(200064, 6144, 3072, 60, 64, 4, 524288)
    | {"head_dim": 128, "rope_theta": 5e6, "eos_token_id": 200020, "rotary_dim": 64, PARTIAL: None}
    | {"dense_intermediate_size": 12288, "shared_intermediate_size": 3072}
    | {"moe_intermediate_size": None, "num_local_experts": 128, "num_experts_per_tok": 4}
    | {"routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    | {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": None, _MTP: None}
    | {"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128}
    | {"index_topk_blocks": 16, "index_local_blocks": 1},
    fixed={
        "attention_output_gate": (None, False),
        "hidden_act": (None, "silu", "swigluoai"),
        "n_shared_experts": (None, 1),
        "qk_norm_type": (None, "per_head"),
        "scoring_func": (None, "sigmoid"),
        "use_gemma_norm": (None, True),
        "use_qk_norm": (None, True),
        "use_routing_bias": (None, True),
    },
    rewrite=_said_beside,
    renames=((r"\.block_sparse_moe\.(e_score_correction_bias)", r".block_sparse_moe.gate.\1"),),
    published_as="MiniMaxM3SparseForCausalLM",
)
# A text model's config in files that do not call it as transformers does.
MINIMAX_M3 = dataclasses.replace(
    MINIMAX_M3_TEXT, architecture="MiniMaxM3ForCausalLM", class_of="minimax_m3_vl_text"
)
MINIMAX_M3_VL = WithImages(
    "MiniMaxM3SparseForConditionalGeneration",
    {
        "minimax_m3_vl_text": MINIMAX_M3_TEXT,
        "minimax_m3": MINIMAX_M3,
        "minimax_m2": MINIMAX_M3,
    },
)
