"""GLM-5-Next: several residual streams; in three of four layers a delta rule with a decay of each
channel, in the others latent attention to the pools of tokens that an indexer chooses; experts."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

from jaxspec.config.experts import BoundedSwiglu
from jaxspec.config.indexer import IndexerConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.recurrent import KimiDeltaConfig
from jaxspec.config.streams import StreamsConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    check_agrees,
    check_keys,
    dense_of,
    model_of,
    sizes,
)
from jaxspec.models.families.indexed import KINDS, shared_layers
from jaxspec.models.families.kimi_linear import LINEAR
from jaxspec.models.families.routed import DEEPSEEK_V3, by_kind, sigmoid_experts
from jaxspec.models.families.windows import FULL
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, is_positive_number, shown

INDEXED = (*KINDS, FULL)  # what files call layers of attention
LOWEST = "linear_lower_bound"
# Inside of ``linear_attn_config``, and what transformers calls the same beside it.
_BESIDE = MappingProxyType(
    {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
        "gate_lower_bound": LOWEST,
    }
)
_LISTS = ("kda_layers", "full_attn_layers")
_SIZES = words(
    "kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim index_topk index_n_heads index_head_dim "
    "linear_num_heads linear_head_dim linear_conv_kernel_dim hc_mult hc_sinkhorn_iters"
)


def _beside(raw: Keys) -> Keys:
    """With what ``linear_attn_config`` says beside it, which counts. ``head_dim`` is not read:
    transformers puts that of what is rotated in its place.

    Raises ValueError for unknown keys in it.
    """
    told, inside = {**raw, "head_dim": None}, raw.get("linear_attn_config")
    if inside is None:
        return told
    if not isinstance(inside, dict):
        raise ValueError(f"linear_attn_config must be an object, got {shown(inside)}")
    known = frozenset([*_BESIDE, *_LISTS, "safe_gate"])
    check_keys(inside, known, {"safe_gate": (True,)}, "linear_attn_config")
    told |= {beside: inside[key] for key, beside in _BESIDE.items() if key in inside}
    if told.get(LOWEST) is None:  # the gate is safe
        told[LOWEST] = -5.0
    return told


def _is_attention(hf: Keys) -> list[bool]:
    """Whether each layer has attention: by ``layer_types``, or else every fourth one.

    Raises ValueError for what is no list of the model's layers, or contradicts
    ``linear_attn_config``, whose lists count layers from 0.
    """
    kinds, count = hf["layer_types"], hf["num_hidden_layers"]
    if kinds is None:
        kinds = [FULL if index % 4 == 3 else LINEAR for index in range(count)]
    if not isinstance(kinds, list) or any(kind not in (LINEAR, *INDEXED) for kind in kinds):
        names = f"{LINEAR} and {KINDS[0]}"
        raise ValueError(f"layer_types must be a list of {names}, got {shown(kinds)}")
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} entries for {count} layers")
    attends = [kind != LINEAR for kind in kinds]
    inside = hf["linear_attn_config"]
    inside = inside if isinstance(inside, dict) else {}
    for name, wanted in zip(_LISTS, (False, True), strict=True):
        told = [index for index, attention in enumerate(attends) if attention == wanted]
        if inside.get(name) not in (None, told):
            raise ValueError(
                f"linear_attn_config: {name} = {shown(inside[name])} contradicts layer_types, "
                f"which say {told}"
            )
    return attends


def _check_sizes(hf: Keys) -> None:
    for name in sorted(_SIZES):
        if not is_positive_integer(hf[name]):
            raise ValueError(f"{name} must be a positive integer, got {shown(hf[name])}")
    if not is_integer(hf["index_kpool"]) or hf["index_kpool"] < 2:
        raise ValueError(f"index_kpool must be 2 or more, got {shown(hf['index_kpool'])}")
    for name in ("swiglu_limit", "hc_eps"):
        if not is_positive_number(hf[name]):
            raise ValueError(f"{name} must be a number above 0, got {shown(hf[name])}")
    lowest = hf[LOWEST]
    if lowest is not None and (isinstance(lowest, bool) or not isinstance(lowest, int | float)):
        raise ValueError(f"{LOWEST} must be a number or null, got {shown(lowest)}")
    check_agrees(hf, "qk_head_dim", hf["qk_nope_head_dim"], "qk_nope_head_dim")
    heads = hf["num_attention_heads"]
    check_agrees(hf, "num_key_value_heads", heads, "num_attention_heads")


def _delta(hf: Keys) -> KimiDeltaConfig:
    return KimiDeltaConfig(
        num_heads=hf["linear_num_heads"],
        head_dim=hf["linear_head_dim"],
        taps=hf["linear_conv_kernel_dim"],
        lowest=None if hf[LOWEST] is None else float(hf[LOWEST]),
        flat_rates=True,
    )


def _attention(hf: Keys, *, shared: bool) -> LatentConfig:
    """Nothing of it is rotated."""
    indexer = IndexerConfig(
        hf["index_topk"],
        hf["index_n_heads"],
        hf["index_head_dim"],
        interleaved=False,
        shared=shared,
        pool=hf["index_kpool"],
    )
    return LatentConfig(
        num_heads=hf["num_attention_heads"],
        rope=None,
        latent=hf["kv_lora_rank"],
        key_dim=hf["qk_nope_head_dim"],
        value_dim=hf["v_head_dim"],
        query_latent=hf["q_lora_rank"],
        scale=hf["qk_nope_head_dim"] ** -0.5,
        interleaved=False,
        bias=hf["attention_bias"],
        indexer=indexer,
        norm_eps=hf["rms_norm_eps"],
    )


def _check_shared(attends: Sequence[bool], shared: Sequence[bool]) -> None:
    """Raise ValueError for attention to what an earlier layer chose where there is another kind of
    layer between, which transformers does not read either."""
    for index, (attention, shares) in enumerate(zip(attends, shared, strict=True)):
        if attention and shares and not attends[index - 1]:
            raise ValueError(
                f"indexer_types: layer {index} shares what layer {index - 1} chooses, which has no "
                "attention: it must be full"
            )


def _read(hf: Keys) -> ModelConfig:
    _check_sizes(hf)
    attends, shared = _is_attention(hf), shared_layers(hf)
    _check_shared(attends, shared)
    activation = BoundedSwiglu(float(hf["swiglu_limit"]))
    dense = dataclasses.replace(dense_of(hf), activation=activation)
    experts = dataclasses.replace(sigmoid_experts(hf, 288), activation=activation)
    if experts.shared_size:
        experts = dataclasses.replace(experts, shared_activation=activation)
    streams = StreamsConfig(hf["hc_mult"], hf["hc_sinkhorn_iters"], float(hf["hc_eps"]))
    delta, has_experts = _delta(hf), by_kind(hf)
    layers = [
        LayerConfig(
            _attention(hf, shared=shared[index]) if attention else delta,
            experts if has_experts(index) else dense,
            streams=streams,
        )
        for index, attention in enumerate(attends)
    ]
    model = model_of(hf, layers)
    if model.mtp is None:
        return model
    # An MTP layer has attention with an indexer, and one residual stream.
    drafting = LayerConfig(_attention(hf, shared=False), experts)
    mtp = dataclasses.replace(model.mtp, layers=(drafting,) * model.mtp.num_layers)
    return dataclasses.replace(model, mtp=mtp)


GLM5_NEXT_TEXT = Family(
    "Glm5NextTextModel",
    _read,
    keys=words("attention_bias router_aux_loss_coef")
    | words("indexer_rope_interleave index_share_for_mtp_iteration"),  # nothing is rotated
    defaults=dict(DEEPSEEK_V3.defaults)
    | sizes(154880, 4096, 12288, 45, 64, 64, 1048576)
    | {"eos_token_id": None, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0}
    | {"q_lora_rank": 1536, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256}
    | {"first_k_dense_replace": 3, "mlp_layer_types": None, "n_group": 1, "topk_group": 1}
    | {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "index_kpool": 16}
    | {"indexer_types": None, "index_topk_pattern": None, "index_topk_freq": None}
    | {"index_skip_topk_offset": 2, "layer_types": None, "linear_attn_config": None}
    | {"linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, LOWEST: -5.0}
    | {"swiglu_limit": 10.0, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20},
    fixed={
        **DEEPSEEK_V3.fixed,
        "index_kpool_always_select_tail": (None, True),
        "index_kpool_compress": (None, True),
        "mhc": (None, True),
        "mla_use_nope": (None, True),
        "moe_router_dtype": (None, "float32"),
        "qk_rope_head_dim": (0,),
        "rope_scaling": (None,),
        "rope_parameters": (None,),
    },
    rewrite=_beside,
    renames=((r"\.index_kpool_compress_gate$", ".index_kpool_compress_gate.weight"),),
)
GLM5_NEXT = WithImages(
    "Glm5NextForConditionalGeneration",
    {"glm5_next_text": GLM5_NEXT_TEXT},
    flat=True,
    defaults={"tie_word_embeddings": False},
)
