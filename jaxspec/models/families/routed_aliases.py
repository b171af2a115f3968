"""Families with experts whose layers are those of others under other names.

They are GLM-4.7-Flash, Kimi K2, Mistral Small 4, dots.llm1, MiniMax-M2, Hy3, ERNIE 4.5, Qwen2-MoE,
and the text model of Qwen3-VL with experts. A family here is a row: what it is like, transformers'
defaults of absent keys, and what is rewritten.
"""

import dataclasses
from collections.abc import Callable

from jaxspec.config.experts import ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Family, Keys, attention_of, dense_of, model_of, sizes
from jaxspec.models.families.rope import (
    BETA_INSIDE,
    PARAMETERS,
    PARTIAL,
    SCALES_QUERIES,
    rope_of,
    with_scaled_queries,
    without_image_positions,
)
from jaxspec.models.families.routed import (
    DEEPSEEK_V3,
    QWEN3_MOE,
    after_dense,
    by_kind,
    every_few,
    read_deepseek,
    sigmoid_experts,
    under_either_name,
    with_experts,
)
from jaxspec.models.families.windows import FULL, SLIDING, optional_windows, windows_by_kind
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, shown


def _map_experts(
    config: ModelConfig, change: Callable[[ExpertsConfig], ExpertsConfig]
) -> ModelConfig:
    """The same with other experts."""

    def changed(layer: LayerConfig) -> LayerConfig:
        mlp = layer.mlp
        if not isinstance(mlp, ExpertsConfig):
            return layer
        return dataclasses.replace(layer, mlp=change(mlp))

    return config.map_layers(changed)


# Latent attention, as DeepSeek-V3's.

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, class_of="deepseek_v3")


# With one name for the number of experts.
_ONE_NAME = {name: v for name, v in DEEPSEEK_V3.defaults.items() if name != "num_local_experts"}
GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    read=lambda hf: read_deepseek({**hf, "num_local_experts": None}),
    defaults=_ONE_NAME
    | sizes(154880, 2048, 10240, 47, 20, 20, 202752)
    | {"rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
    | {"mlp_layer_types": None, "first_k_dense_replace": 1, "n_routed_experts": 64}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8}
    | {"n_group": 1, "topk_group": 1},
)


def _latent_rope(raw: Keys) -> Keys:
    """Mistral 4's config, whose ``head_dim`` and rope are of whole heads: the share that is rotated
    follows from ``qk_rope_head_dim``."""
    raw = with_scaled_queries(raw, factor=128.0, original=8192, theta=10000.0)
    rotated, fixed = (raw.get(f"qk_{part}_head_dim", 64) for part in ("rope", "nope"))
    if not is_positive_integer(rotated) or not is_positive_integer(fixed):
        return raw  # which is an error of read_deepseek
    whole = rotated + fixed
    found = {key: raw[key] for key in PARAMETERS if isinstance(raw.get(key), dict)}
    for key, given in found.items():
        if given.get(PARTIAL, rotated / whole) != rotated / whole:
            raise ValueError(f"{PARTIAL} must be {rotated / whole}, got {shown(given[PARTIAL])}")
        raw = {**raw, key: {name: value for name, value in given.items() if name != PARTIAL}}
    return {**raw, "head_dim": None} if raw.get("head_dim") == whole else raw


def _read_mistral4(hf: Keys) -> ModelConfig:
    """Experts are chosen by a softmax, without a correction."""

    def changed(mlp: ExpertsConfig) -> ExpertsConfig:
        routing = dataclasses.replace(mlp.routing, scores="softmax", correction=False)
        return dataclasses.replace(mlp, routing=routing, fused="stacked")

    return _map_experts(read_deepseek({**hf, "num_local_experts": None}), changed)


MISTRAL4 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Mistral4ForCausalLM",
    read=_read_mistral4,
    defaults=_ONE_NAME
    | sizes(131072, 4096, 12288, 36, 32, 32, 1048576)
    | {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "eos_token_id": 2}
    | {"first_k_dense_replace": 0, "n_routed_experts": 128, "num_experts_per_tok": 4}
    | {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    | dict(SCALES_QUERIES),
    fixed=BETA_INSIDE,
    rewrite=_latent_rope,
)

# Grouped heads.


def _read_dots1(hf: Keys) -> ModelConfig:
    """A GLM-4.5 with norms of queries and keys, whole heads rotated, and optional windows."""
    plain = dataclasses.replace(attention_of(hf, rope_of(hf)), qk_norm=True)
    experts, has_experts = sigmoid_experts(hf, 128), after_dense(hf)
    windows = enumerate(optional_windows(hf))
    return model_of(
        hf,
        [
            LayerConfig(
                dataclasses.replace(plain, window=window),
                experts if has_experts(i) else dense_of(hf),
            )
            for i, window in windows
        ],
    )


DOTS1 = Family(
    "Dots1ForCausalLM",
    _read_dots1,
    keys=words("attention_bias"),
    defaults=sizes(152064, 4608, 10944, 62, 32, 32, 2048)
    | {"eos_token_id": None, "sliding_window": 4096, "max_window_layers": 62, "layer_types": None}
    | {"n_routed_experts": None, "num_local_experts": None, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "norm_topk_prob": False}
    | {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    fixed={"topk_method": (None, "noaux_tc"), "scoring_func": (None, "sigmoid", "noaux_tc")},
)


def _partly_rotated(raw: Keys) -> Keys:
    """MiniMax-M2's config, whose ``rotary_dim`` is a share of a head. Raises ValueError for layers
    that are not all softmax attention."""
    kinds = raw.get("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise ValueError(f"attn_type_list = {shown(kinds)} is not supported, only a list of 1")
    rotary, width = raw.get("rotary_dim"), raw.get("head_dim", 128)
    if rotary is None:
        return raw
    if not is_positive_integer(rotary) or not is_positive_integer(width):
        raise ValueError(f"rotary_dim must be a positive integer, got {shown(rotary)}")
    return {PARTIAL: rotary / width, **raw}


def _read_minimax(hf: Keys) -> ModelConfig:
    """Norms over all heads of queries and of keys; a sigmoid router with a correction."""
    routing = RoutingConfig(
        hf["num_local_experts"],
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=True,
        correction=True,
    )
    names = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
    experts = ExpertsConfig(hf["intermediate_size"], routing, names=names)
    plain = attention_of(hf, rope_of(hf))
    return with_experts(hf, dataclasses.replace(plain, qk_norm=True, whole_qk_norm=True), experts)


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    _read_minimax,
    keys=words(
        """rotary_dim attn_type_list use_mtp num_mtp_modules mtp_transformer_layers
        mlp_intermediate_size shared_moe_mode layernorm_full_attention_alpha
        layernorm_full_attention_beta layernorm_linear_attention_alpha
        layernorm_linear_attention_beta layernorm_mlp_alpha layernorm_mlp_beta"""
    ),
    defaults=sizes(200064, 3072, 1536, 62, 48, 8, 196608)
    | {"head_dim": 128, "rope_theta": 5e6, "eos_token_id": 200020, PARTIAL: None}
    | {"num_local_experts": 256, "num_experts_per_tok": 8},
    fixed={
        "scoring_func": (None, "sigmoid"),
        "use_qk_norm": (None, True),
        "qk_norm_type": (None, "per_layer"),
        "use_routing_bias": (None, True),
        "shared_intermediate_size": (None, 0),
    },
    rewrite=_partly_rotated,
    renames=((r"\.block_sparse_moe\.(e_score_correction_bias)", r".block_sparse_moe.gate.\1"),),
)


def _read_hy_v3(hf: Keys) -> ModelConfig:
    """Norms of queries and keys; a sigmoid router with a correction, and a shared expert."""
    routing = RoutingConfig(
        hf["num_experts"],
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=True,
        scale=float(hf["router_scaling_factor"]),
        correction=True,
    )
    width = hf["moe_intermediate_size"]
    experts = ExpertsConfig(width, routing, shared_size=hf["num_shared_experts"] * width)
    attention = dataclasses.replace(attention_of(hf, rope_of(hf)), qk_norm=True)
    return with_experts(hf, attention, experts, by_kind(hf))


HY_V3 = Family(
    "HYV3ForCausalLM",
    _read_hy_v3,
    keys=words("attention_bias enable_moe_fp32_combine"),  # the latter is of bfloat16's rounding
    defaults=sizes(120832, 4096, 13312, 80, 64, 8, 131072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "eos_token_id": None}
    | {"num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    | {"num_shared_experts": 1, "router_scaling_factor": 2.826, "mlp_layer_types": None}
    | {"first_k_dense_replace": 1},
    renames=(
        (r"\.mlp\.router\.gate\.", ".mlp.gate."),
        (r"\.mlp\.(expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
    ),
    left_out=(r"^model\.layers\.{layers}\.",),  # an MTP layer with a norm that no other has
)


def _few(hf: Keys) -> Callable[[int], bool]:
    """Which layers have experts in ERNIE: every few from a first one to a last one. Raises
    ValueError for what is no layer."""
    names = ("moe_layer_start_index", "moe_layer_end_index")
    for name in names:
        if not is_integer(hf[name]) or hf[name] < -1:
            raise ValueError(f"{name} must be an integer from -1 on, got {shown(hf[name])}")
    first, last = (hf[name] for name in names)
    last = hf["num_hidden_layers"] - 1 if last == -1 else last
    return lambda i: first <= i <= last and (i + 1) % hf["moe_layer_interval"] == 0


def _read_ernie(hf: Keys) -> ModelConfig:
    """A softmax router with a correction for the choice."""
    routing = RoutingConfig(
        hf["moe_num_experts"], hf["moe_k"], "softmax", normalize=True, correction=True
    )
    width = hf["moe_intermediate_size"]
    experts = ExpertsConfig(width, routing, shared_size=hf["moe_num_shared_experts"] * width)
    attention = dataclasses.replace(attention_of(hf, rope_of(hf)), interleaved=True)
    return with_experts(hf, attention, experts, _few(hf))


ERNIE4_5_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    _read_ernie,
    keys=words("moe_capacity moe_norm_min"),
    defaults=sizes(103424, 2560, 12288, 28, 20, 4, 131072)
    | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}
    | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
    | {"moe_layer_interval": 1},
    fixed={
        "use_bias": (None, False),
        "moe_gate": (None, "topk"),
        "moe_use_aux_free": (None, True),
    },
    renames=((r"\.moe_statics\.e_score_correction_bias$", ".gate.e_score_correction_bias"),),
    left_out=(r"^model\.mtp_",),
)


def _read_qwen2_moe(hf: Keys) -> ModelConfig:
    """Biases of q, k and v, and an expert that all tokens go through, with a gate."""
    routing = RoutingConfig(
        under_either_name(hf, "num_experts", "num_local_experts", 60),
        hf["num_experts_per_tok"],
        normalize=hf["norm_topk_prob"],
    )
    experts = ExpertsConfig(
        hf["moe_intermediate_size"],
        routing,
        shared_size=hf["shared_expert_intermediate_size"],
        shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )
    plain = dataclasses.replace(attention_of(hf, rope_of(hf)), qkv_bias=hf["qkv_bias"])
    first, has_experts = hf["max_window_layers"], every_few(hf)
    used = hf["use_sliding_window"]
    kinds = [
        SLIDING if used and i % 2 == 0 and i < first else FULL
        for i in range(hf["num_hidden_layers"])
    ]
    return model_of(
        hf,
        [
            LayerConfig(
                dataclasses.replace(plain, window=window),
                experts if has_experts(i) else dense_of(hf),
            )
            for i, window in enumerate(windows_by_kind(hf, kinds))
        ],
    )


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    _read_qwen2_moe,
    defaults=dict(QWEN3_MOE.defaults)
    | sizes(151936, 2048, 5632, 24, 16, 16, 32768)
    | {"max_window_layers": 28, "layer_types": None, "qkv_bias": True}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"num_experts_per_tok": 4},
)


def _read_qwen3_vl(hf: Keys) -> ModelConfig:
    """A Qwen3-MoE; weights of experts are normalized, and a tensor holds all of a layer."""
    count = under_either_name(hf, "num_experts", "num_local_experts", 60)
    counts = {"num_experts": count, "num_local_experts": count}
    config = QWEN3_MOE.read({**hf, **counts, "norm_topk_prob": True})
    return _map_experts(config, lambda mlp: dataclasses.replace(mlp, fused="halves"))


QWEN3_VL_MOE_TEXT = Family(
    "Qwen3VLMoeForCausalLM",
    _read_qwen3_vl,
    keys=words("attention_bias"),
    defaults=dict(QWEN3_MOE.defaults)
    | sizes(151936, 2048, 5632, 24, 16, 16, 128000)
    | {"rope_theta": 500_000.0, "tie_word_embeddings": True, "moe_intermediate_size": 1408}
    | {"num_experts_per_tok": 4},
    fixed={"norm_topk_prob": (None, True), "use_sliding_window": (None, False)},
    rewrite=without_image_positions,
)
