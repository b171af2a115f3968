"""Small random checkpoints of families whose layers are those of others under other names, of
Gemma 4, of GLM-5-Next, of DeepSeek-V4, of Qwen3.8-Flash-Next, of MiniMax M3, and of Hy4.

They are made with transformers.
"""

import copy
import json
from pathlib import Path
from typing import Any

import transformers
from safetensors.numpy import load_file

from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.json.values import read_json
from tests.helpers import (
    deepseek_v4_checkpoints,
    gemma4_checkpoints,
    glm5_next_checkpoints,
    hy_v4_checkpoints,
    minimax_m3_checkpoints,
    qwen4_exp_checkpoints,
)
from tests.helpers.checkpoints import TINY, save_random_model, save_tensors
from tests.helpers.random_experts import random_expert_target

SIZES = TINY | {"num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SHARED: dict[str, Any] = EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
# Texts are longer than what is attended to. With many heads hardly any scores are equal, as those
# without a product above 0 are: of these transformers chooses any. Padding has embeddings of 0.
INDEXER = {
    "index_topk": 12,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "head_dim": 8,
    "pad_token_id": None,
}
# Queries are multiplied from the original length on, which texts are some times as long as.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
INDEX_YARN = {name: value for name, value in YARN.items() if "llama_4" not in name} | {
    "mscale_all_dim": 0.7
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}
QWEN3_VISION = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}


# Full layers and those with a window differ in heads and rope, and a text of 40 tokens is longer
# than the original length. Limits differ from layer to layer.
STEP: dict[str, Any] = {
    "model_type": "step3p5",
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_attention_groups": 2,
    "head_dim": 32,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 8,
        "num_attention_groups": 2,
        "head_dim": 32,
        "true_head_dim": 32,
    },
    "sliding_window": 8,
    "rope_theta": [5e6, 1e4, 5e6],
    "partial_rotary_factors": [0.5, 1.0, 0.5],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "moe_layers_enum": "1,2",
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_intermediate_size": 48,
    "share_expert_dim": 96,
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.2, 0.0],
    "swiglu_limits_shared": [0.3, 0.1, 0.0],
    "use_head_wise_attn_gate": True,
}


LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 8,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 9,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 16,
    },
}
LLAMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def _mrope(*section: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {"rope_parameters": rope}


def _with_images(vision: dict[str, Any], *, tied: bool = False, **text: Any) -> dict[str, Any]:
    return {"text_config": SIZES | text, "vision_config": vision, "tie_word_embeddings": tied}


# The class of the config, and what it has other than SIZES; of text and images, all it has.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "seed_oss": (transformers.SeedOssConfig, {"head_dim": 32}),
    "hunyuan": (
        transformers.HunYuanDenseV1Config,
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 9.0}
            | {"factor": 1.0},
        },
    ),
    "apertus": (
        transformers.ApertusConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "attention_bias": True,
        },
    ),
    "cohere2": (
        transformers.Cohere2Config,
        {
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "sliding_window": 7,
            "logit_scale": 0.25,
            "attention_bias": True,
        },
    ),
    "ministral3": (transformers.Ministral3Config, {"head_dim": 16, "rope_parameters": YARN}),
    "granite4": (
        transformers.GraniteMoeHybridConfig,
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.4,
        },
    ),
    "ernie4_5": (transformers.Ernie4_5Config, {"head_dim": 32, "use_bias": True}),
    "exaone4": (transformers.Exaone4Config, {"sliding_window": 7, "sliding_window_pattern": 2}),
    "exaone4-no-windows": (
        transformers.Exaone4Config,
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "exaone_moe": (
        transformers.ExaoneMoeConfig,
        QWEN_EXPERTS
        | {"num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 3}
        | {"head_dim": 32, "n_group": 4, "topk_group": 2},
    ),
    "youtu": (transformers.YoutuConfig, LATENT | {"attention_bias": True}),
    "axk1": (
        transformers.AXK1Config,
        LATENT | EXPERTS | {"n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    ),
    "solar_open": (
        transformers.SolarOpenConfig,
        EXPERTS | {"head_dim": 32, "n_shared_experts": 2, "routed_scaling_factor": 1.7},
    ),
    "mellum": (
        transformers.MellumConfig,
        QWEN_EXPERTS
        | {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        LATENT | EXPERTS | {"routed_scaling_factor": 1.8, "q_lora_rank": 16},
    ),
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        LATENT | SHARED | INDEXER | {"n_group": 1, "topk_group": 1, "rope_parameters": INDEX_YARN},
    ),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, LATENT | SHARED | INDEXER),
    "glm_moe_dsa-shared": (
        transformers.GlmMoeDsaConfig,
        LATENT
        | SHARED
        | INDEXER
        | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "mistral4": (transformers.Mistral4Config, LATENT | SHARED | {"rope_parameters": YARN}),
    "dots1": (
        transformers.Dots1Config,
        SHARED
        | {"head_dim": 32, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"sliding_window": 8, "max_window_layers": 1},
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 16},
    ),
    "hy_v3": (
        transformers.HYV3Config,
        QWEN_EXPERTS | {"head_dim": 32, "num_shared_experts": 1},
    ),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48},
    ),
    "ministral": (
        transformers.MinistralConfig,
        {
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "arcee": (transformers.ArceeConfig, {"attention_bias": True, "mlp_bias": True}),
    "olmoe": (
        transformers.OlmoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48},
    ),
    "granitemoe": (
        transformers.GraniteMoeConfig,
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
        | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
        | {"residual_multiplier": 0.3, "attention_multiplier": 0.4},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        QWEN_EXPERTS
        | {"shared_expert_intermediate_size": 96}
        | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen2_vl": (
        transformers.Qwen2VLConfig,
        _with_images(VISION | {"embed_dim": 32}, **_mrope(2, 3, 3)),
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        _with_images(VISION | {"fullatt_block_indexes": [0]}, tied=True, **_mrope(2, 3, 3)),
    ),
    "qwen3_vl": (
        transformers.Qwen3VLConfig,
        _with_images(QWEN3_VISION, head_dim=32, **_mrope(6, 5, 5)),
    ),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeConfig,
        _with_images(QWEN3_VISION, head_dim=32, **QWEN_EXPERTS, **_mrope(6, 5, 5)),
    ),
    # Texts are some chunks long; layer 2 does not rotate.
    "llama4_text": (transformers.Llama4TextConfig, LLAMA4),
    "llama4": (
        transformers.Llama4Config,
        _with_images(LLAMA4_VISION, **dict[str, Any](LLAMA4, num_hidden_layers=2)),
    ),
    "mistral3": (
        transformers.Mistral3Config,
        _with_images(PIXTRAL, model_type="mistral", head_dim=16, sliding_window=None),
    ),
    "mistral3-ministral3": (
        transformers.Mistral3Config,
        _with_images(
            PIXTRAL, tied=True, model_type="ministral3", head_dim=16, rope_parameters=YARN
        ),
    ),
    "step3p7": (
        transformers.Step3p7Config,
        _with_images({"width": 32, "layers": 1, "heads": 2, "image_size": 28}, **STEP),
    ),
    "glm4v_moe": (
        transformers.Glm4vMoeConfig,
        _with_images(VISION, head_dim=32, **SHARED, **_mrope(2, 3, 3)),
    ),
    "exaone4_5": (
        transformers.Exaone4_5_Config,
        _with_images(
            VISION | {"fullatt_block_indexes": [0]},
            model_type="exaone4",
            sliding_window=7,
            sliding_window_pattern=2,
        ),
    ),
    "kimi_k25": (
        transformers.Kimi_K25Config,
        _with_images(
            {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32}
            | {"intermediate_size": 32},
            model_type="deepseek_v3",
            **LATENT,
            **SHARED,
            n_group=1,
            topk_group=1,
        ),
    ),
    **gemma4_checkpoints.VARIANTS,
    **glm5_next_checkpoints.VARIANTS,
    **deepseek_v4_checkpoints.VARIANTS,
    **qwen4_exp_checkpoints.VARIANTS,
    **minimax_m3_checkpoints.VARIANTS,
    **hy_v4_checkpoints.VARIANTS,
}


def raw_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a variant with few tokens and an LM head of its own, whose texts do
    not end, unless the model reads where they do."""
    kind, own = copy.deepcopy(VARIANTS[name])  # transformers changes what it is given
    given = own if "text_config" in own else SIZES | own
    raw = kind(**given | {"tie_word_embeddings": False}).to_dict()
    ends = name in qwen4_exp_checkpoints.VARIANTS  # which reads where texts end
    for keys in (raw, raw.get("text_config", {})):
        keys["eos_token_id"] = 39 if ends else None
        for key in keys.keys() & {"vocab_size", "vocab_size_per_layer_input"}:
            keys[key] = 96
    absent = {key for key, value in raw.items() if value is None} - {"sliding_window"}
    rest = {key: value for key, value in raw.items() if key not in absent}
    return rest | {"eos_token_id": 39 if ends else None}


def random_alias(name: str) -> Decoder:
    """Nearly a bigram model with the layers of a variant (see random_target)."""
    return random_expert_target(parse_model_config(raw_config(name)))


def save_alias(directory: Path, name: str, **changes: Any) -> Path:
    """A checkpoint of a variant, with the names of tensors that published ones have."""
    kind, own = copy.deepcopy(VARIANTS[name])  # transformers changes what it is given
    given = own if "text_config" in own else SIZES | own
    save_random_model(directory, kind(**given | changes))
    if name == "step3p7":  # with the keys of published files, which transformers does not write
        raw = read_json(directory / "config.json") | {"text_config": SIZES | STEP}
        (directory / "config.json").write_text(json.dumps(raw))
    if name in glm5_next_checkpoints.VARIANTS:
        return glm5_next_checkpoints.with_all_weights(directory)
    if name in deepseek_v4_checkpoints.VARIANTS:
        return deepseek_v4_checkpoints.with_tables(directory)
    if name in qwen4_exp_checkpoints.VARIANTS:
        return qwen4_exp_checkpoints.with_all_weights(directory)
    if name in hy_v4_checkpoints.VARIANTS:
        return hy_v4_checkpoints.with_all_weights(directory)
    if name != "kimi_k25":
        return directory
    tensors = {  # transformers 5.24 writes other names than it reads
        name.replace("language_model.model.blocks.", "language_model.model.layers."): value
        for name, value in load_file(directory / "model.safetensors").items()
    }
    return save_tensors(directory, tensors, read_json(directory / "config.json"))
