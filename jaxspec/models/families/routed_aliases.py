"""Families with experts whose layers are those of others under other names.

They are GLM-4.7-Flash, Kimi K2, A.X-K1, Mistral Small 4, Solar Open, the text model of GLM-4.5V,
dots.llm1, MiniMax-M2 and Hy3. A family here is a row: what it is like, transformers'
defaults of absent keys, and what is rewritten.
"""

import dataclasses

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
    GLM4_MOE,
    after_dense,
    by_kind,
    map_experts,
    read_deepseek,
    sigmoid_experts,
    with_experts,
)
from jaxspec.models.families.windows import optional_windows
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_integer, shown

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

    return map_experts(read_deepseek({**hf, "num_local_experts": None}), changed)


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


def _read_axk1(hf: Keys) -> ModelConfig:
    """What experts give is normed. They are chosen with a correction where the files have one:
    transformers' do, and those that are published have none, it says."""

    def changed(layer: LayerConfig) -> LayerConfig:
        mlp = layer.mlp
        if not isinstance(mlp, ExpertsConfig):
            return layer
        routing = dataclasses.replace(mlp.routing, correction=None)
        mlp = dataclasses.replace(mlp, routing=routing)
        return dataclasses.replace(layer, mlp=mlp, norms="both_of_mlp")

    return read_deepseek({**hf, "num_local_experts": None}).map_layers(changed)


AXK1 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="AXK1ForCausalLM",
    read=_read_axk1,
    defaults=_ONE_NAME
    | sizes(163840, 7168, 18432, 61, 64, 64, 32768)
    | {"eos_token_id": 163691, "mlp_layer_types": None, "first_k_dense_replace": 1}
    | {"n_routed_experts": 192, "num_nextn_predict_layers": 0},
    fixed={"scoring_func": (None, "sigmoid"), "moe_layer_freq": (None, 1)}
    | {"topk_method": (None, "noaux_tc")},
    renames=((r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),),
)

AXK1_PUBLISHED = dataclasses.replace(AXK1, class_of="axk1")

# Grouped heads.

_GLM_WITHOUT_NORMS = {name: v for name, v in GLM4_MOE.defaults.items() if name != "use_qk_norm"}
SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    architecture="SolarOpenForCausalLM",
    keys=GLM4_MOE.keys | words("intermediate_size"),  # no layer is dense
    defaults=_GLM_WITHOUT_NORMS
    | {"vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64, "head_dim": 128}
    | {"moe_intermediate_size": 1280, "rope_theta": 1e6, "partial_rotary_factor": None}
    | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0},
    read=lambda hf: GLM4_MOE.read({**hf, "use_qk_norm": False}),
    fixed={"use_qk_norm": (None, False)},
)

GLM4V_MOE_TEXT = dataclasses.replace(
    GLM4_MOE,
    architecture="Glm4vMoeForCausalLM",
    defaults=_GLM_WITHOUT_NORMS
    | {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True}
    | {"num_nextn_predict_layers": 0},
    read=SOLAR_OPEN.read,
    fixed=SOLAR_OPEN.fixed,
    rewrite=without_image_positions,
)


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
        # Of its MTP layer.
        (r"\.final_layernorm\.", ".shared_head.norm."),
        (r"\.shared_head\.weight$", ".shared_head.head.weight"),
    ),
)
