"""Ling 3: most layers have a delta rule with a bounded decay of each channel, the last of each
group latent attention whose heads have a gate; experts as DeepSeek-V3's, whose activation is
limited in the last layers."""

import dataclasses

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.recurrent import KimiDeltaConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    check_agrees,
    dense_of,
    model_of,
    sizes,
)
from jaxspec.models.families.kimi_linear import LINEAR, READ_AS
from jaxspec.models.families.rope import PARAMETERS, PARTIAL
from jaxspec.models.families.routed import DEEPSEEK_V3, by_kind, latent_of, sigmoid_experts
from jaxspec.models.families.step import limit_of
from jaxspec.models.families.windows import FULL
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import check_flag, is_positive_integer, shown

EXPERT_LIMITS, SHARED_LIMITS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"


def _by_common_names(raw: Keys) -> Keys:
    """By the names of other families. What is rotated is ``qk_rope_head_dim`` entries, which some
    files say as a part of a head, too.

    Raises ValueError for two names, or two numbers of entries, that contradict each other.
    """
    renamed = dict(raw)
    for key, common in READ_AS.items():
        if key in raw:
            renamed[common] = renamed.pop(key)
            if common in raw:
                check_agrees(raw, common, raw[key], key)
    width, rotated = raw.get("head_dim", 128), raw.get("qk_rope_head_dim", 64)
    parts = [raw, *(raw[key] for key in PARAMETERS if isinstance(raw.get(key), dict))]
    for part in (inside.get(PARTIAL) for inside in parts):
        if part is not None and part * width != rotated:
            raise ValueError(
                f"{PARTIAL} = {shown(part)} of head_dim = {shown(width)} contradicts "
                f"qk_rope_head_dim = {shown(rotated)}"
            )
    for key in PARAMETERS:
        if isinstance(raw.get(key), dict):
            renamed[key] = {name: x for name, x in raw[key].items() if name != PARTIAL}
    renamed.pop(PARTIAL, None)
    return renamed


def _is_attention(hf: Keys) -> list[bool]:
    """Whether each layer has attention: by ``layer_types``, or else the last of each group.

    Raises ValueError for what is no list of the model's layers.
    """
    kinds, count, size = hf["layer_types"], hf["num_hidden_layers"], hf["layer_group_size"]
    if not is_positive_integer(size):
        raise ValueError(f"layer_group_size must be a positive integer, got {shown(size)}")
    if kinds is None:
        return [(index + 1) % size == 0 for index in range(count)]
    if not isinstance(kinds, list) or any(kind not in (FULL, LINEAR) for kind in kinds):
        raise ValueError(f"layer_types must be a list of {FULL} and {LINEAR}, got {shown(kinds)}")
    if len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} entries for {count} layers")
    return [kind == FULL for kind in kinds]


def _delta(hf: Keys) -> KimiDeltaConfig:
    """transformers writes the sizes under names of their own, beside a ``head_dim`` of another."""
    width = hf["linear_head_dim"] or hf["head_dim"]
    check_agrees(hf, "linear_num_heads", hf["num_attention_heads"], "num_attention_heads")
    taps = hf["short_conv_kernel_size"]
    check_agrees(hf, "linear_conv_kernel_dim", taps, "short_conv_kernel_size")
    for key, value in {"head_dim": width, "short_conv_kernel_size": taps}.items():
        if not is_positive_integer(value):
            raise ValueError(f"{key} must be a positive integer, got {shown(value)}")
    safe, lowest = check_flag("kda_safe_gate", hf["kda_safe_gate"]), hf["kda_lower_bound"]
    if safe and (isinstance(lowest, bool) or not isinstance(lowest, int | float)):
        raise ValueError(f"kda_lower_bound must be a number, got {shown(lowest)}")
    return KimiDeltaConfig(
        num_heads=hf["num_attention_heads"],
        head_dim=width,
        taps=taps,
        lowest=float(lowest) if safe else None,
        flat_rates=True,
        direct=True,
    )


def _attention(hf: Keys) -> LatentConfig:
    check_agrees(hf, "rotary_dim", hf["qk_rope_head_dim"], "qk_rope_head_dim")
    return dataclasses.replace(latent_of({**hf, "head_dim": None}), gate="heads")


def _experts(hf: Keys, index: int) -> ExpertsConfig:
    """The experts of a layer, with the limits of its activation, which transformers does not read:
    vLLM and SGLang do, and the model is trained with them."""
    experts, width = sigmoid_experts(hf, 512), hf["moe_intermediate_size"]
    check_agrees(hf, "moe_shared_expert_intermediate_size", width, "moe_intermediate_size")
    shared = limit_of(hf, SHARED_LIMITS, index) if experts.shared_size else None
    activation = limit_of(hf, EXPERT_LIMITS, index)
    return dataclasses.replace(experts, activation=activation, shared_activation=shared)


def _read(hf: Keys) -> ModelConfig:
    delta, attention, dense = _delta(hf), _attention(hf), dense_of(hf)
    has_experts, count = by_kind(hf), hf["num_hidden_layers"]
    layers = [
        LayerConfig(attention if attends else delta, _experts(hf, i) if has_experts(i) else dense)
        for i, attends in enumerate(_is_attention(hf))
    ]
    model = model_of(hf, layers)
    if model.mtp is None:
        return model
    drafting = (
        LayerConfig(attention, _experts(hf, count + i)) for i in range(model.mtp.num_layers)
    )
    return dataclasses.replace(model, mtp=dataclasses.replace(model.mtp, layers=tuple(drafting)))


LING3 = Family(
    "BailingHybridForCausalLM",
    _read,
    keys=words("attention_bias partial_rotary_factor router_dtype mtp_loss_scaling_factor")
    | words("embedding_dropout output_dropout linear_silu max_window_layers use_qk_norm seq_aux")
    | READ_AS.keys(),
    defaults=dict(DEEPSEEK_V3.defaults)
    | sizes(157184, 2560, 6144, 42, 32, 32, 262144)
    | {"eos_token_id": 156895, "rope_theta": 6e6, "head_dim": 128, "q_lora_rank": None}
    | {"first_k_dense_replace": 2, "mlp_layer_types": None, "moe_intermediate_size": 768}
    | {"layer_types": None, "layer_group_size": 6, "short_conv_kernel_size": 4}
    | {"kda_safe_gate": True, "kda_lower_bound": -5.0, "linear_head_dim": None}
    | {"linear_num_heads": None, "linear_conv_kernel_dim": None, "rotary_dim": None}
    | {"moe_shared_expert_intermediate_size": None, EXPERT_LIMITS: None, SHARED_LIMITS: None},
    fixed={
        **DEEPSEEK_V3.fixed,
        "gated_attention_proj_granularity_type": (None, "head_wise"),
        "group_norm_size": (None, 1),
        "moe_router_enable_expert_bias": (None, True),
        "mtp_use_kda": (None, False),
        "multi_gate": (None, False),
        "no_kda_lora": (None, True),
        "num_kv_heads_for_linear_attn": (None, 0),
        "rope_interleave": (None, True),
        "router_type": (None, "topN"),
        "scale_router_input": (None, False),
        "score_function": (None, "sigmoid"),
        "up_proj_norm": (None, False),
        "use_bias": (None, False),
        "use_kda_lora": (None, False),
        "use_mla_nope": (None, False),
        "use_nGPT": (None, False),
        "use_qkv_bias": (None, False),
        "value_norm": (None, False),
    },
    rewrite=_by_common_names,
    renames=(
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"^(model\.layers\.\d+\.)final_layernorm\.", r"\1shared_head.norm."),  # an MTP layer's
    ),
    published_as="BailingMoeV3ForCausalLM",
)
