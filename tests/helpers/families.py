"""Small random checkpoints of every family, made with transformers."""

from pathlib import Path
from typing import Any

import transformers

from tests.helpers import alias_checkpoints, hybrid_checkpoints, mtp_families
from tests.helpers.checkpoints import TINY, save_random_model

LENGTH = 40  # of the texts that logits are compared for
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WIDE_YARN = YARN | {
    "rope_theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24}
NEMOTRON: dict[str, Any] = {
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "time_step_min": 1e-9,  # steps are at least as long in transformers' pass over many tokens
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 1.7,
}
KIMI: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 48,
}
LING: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_group_size": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
}
RECURRENT = ("bamba", "falcon", "granite4", "kimi", "nemotron")  # which forget each token at once
GLM = {
    "head_dim": 32,
    "n_routed_experts": 16,  # 4 in a group, of which the best two count
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "n_shared_experts": 2,
}
DEEPSEEK: dict[str, Any] = mtp_families.CONFIGS["deepseek_v3"] | {
    "moe_intermediate_size": 48,
    "num_mtp_layers": 0,
}
LLAMA = {"rms_norm_eps": 1e-5}
# The class of the config, and what it has other than TINY.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-mha": (transformers.LlamaConfig, LLAMA | {"num_key_value_heads": 4}),
    "llama-gqa": (transformers.LlamaConfig, LLAMA),
    "llama-mqa": (transformers.LlamaConfig, LLAMA | {"num_key_value_heads": 1}),
    "llama-tied": (transformers.LlamaConfig, LLAMA | {"tie_word_embeddings": True}),
    "llama-biases": (transformers.LlamaConfig, LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (transformers.LlamaConfig, LLAMA | {"head_dim": 24}),
    "llama3-rope": (transformers.LlamaConfig, LLAMA | {"rope_parameters": LLAMA3}),
    "linear": (transformers.LlamaConfig, {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    # Up to the longest text: longer ones would be rotated otherwise, and are refused.
    "dynamic": (
        transformers.LlamaConfig,
        {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": LENGTH},
    ),
    "yarn": (transformers.LlamaConfig, {"rope_scaling": YARN}),
    "yarn-mscale": (
        transformers.LlamaConfig,
        {
            "rope_scaling": YARN
            | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False, "beta_fast": 8.0}
        },
    ),
    "longrope": (
        transformers.LlamaConfig,
        {"head_dim": 8, "rope_scaling": LONGROPE | {"original_max_position_embeddings": 64}},
    ),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-windows": (transformers.Qwen2Config, WINDOWS),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "qwen3-biases-windows": (
        transformers.Qwen3Config,
        WINDOWS | {"head_dim": 32, "attention_bias": True},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 8}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 24}),
    "gemma2": (
        transformers.Gemma2Config,
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        GEMMA
        | {
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-cap": (
        transformers.Gemma3TextConfig,
        GEMMA | {"final_logit_softcapping": 2.0, "attention_bias": True},
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 9}),
    "phi4-mini": (
        transformers.Phi3Config,
        {
            "rope_parameters": LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo2-mqa": (transformers.Olmo2Config, {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": (
        transformers.Olmo3Config,
        {"sliding_window": 7, "num_hidden_layers": 4, "rope_scaling": YARN},
    ),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "smollm3-windows": (
        transformers.SmolLM3Config,
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.4,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 6, "sliding_window": 8}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        QWEN_MOE | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_moe-every-second": (
        transformers.Qwen3MoeConfig,
        QWEN_MOE | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8},
    ),
    "glm4_moe": (transformers.Glm4MoeConfig, GLM),
    "glm4_moe-qk-norm": (
        transformers.Glm4MoeConfig,
        GLM | {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "intermediate_size": 64,  # as wide as hidden states: layouts cannot be told by shapes
            "rope_parameters": WIDE_YARN | {"truncate": False},
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        DEEPSEEK | {"rope_parameters": WIDE_YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-no-query-latent": (
        transformers.DeepseekV3Config,
        DEEPSEEK | {"q_lora_rank": None, "attention_bias": True},
    ),
    "deepseek_v3-halves": (
        transformers.DeepseekV3Config,
        DEEPSEEK | {"rope_interleave": False, "first_k_dense_replace": 2},
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 32,
        },
    ),
    "lfm2-biases": (
        transformers.Lfm2Config,
        {
            "full_attn_idxs": [0],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": (
        transformers.Lfm2MoeConfig,
        QWEN_MOE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "bamba": (
        transformers.BambaConfig,
        MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_groups": 2},
    ),
    "bamba-biases": (
        transformers.BambaConfig,
        MAMBA
        | {"attn_layer_indices": [0], "mamba_proj_bias": True, "mamba_conv_bias": False}
        | {"mamba_n_groups": 1, "mamba_d_conv": 3, "attention_bias": True, "mlp_bias": True},
    ),
    "falcon_h1": (
        transformers.FalconH1Config,
        MAMBA
        | {"mamba_d_ssm": 128, "mamba_n_groups": 2}
        | {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.6}
        | {"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7}
        | {"ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2, "mlp_multipliers": [0.7, 1.4]}
        | {"ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]},
    ),
    "falcon_h1-norm-before-gate": (
        transformers.FalconH1Config,
        MAMBA
        | {"mamba_d_ssm": None, "mamba_n_groups": 2, "mamba_rms_norm": True}
        | {"attention_bias": True, "mlp_bias": True, "mlp_multipliers": [0.7, 1.4]}
        | {"mamba_proj_bias": True, "projectors_bias": True, "key_multiplier": 0.6},
    ),
    "falcon_h1-norm-after-gate": (
        transformers.FalconH1Config,
        MAMBA
        | {"mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        NEMOTRON | {"num_hidden_layers": 5, "hybrid_override_pattern": "M-*EM"},
    ),
    "nemotron_h-latent": (
        transformers.NemotronHConfig,
        NEMOTRON
        | {"num_hidden_layers": 4, "hybrid_override_pattern": "EM*E", "moe_latent_size": 24}
        | {"n_group": 4, "topk_group": 2, "n_groups": 1, "use_conv_bias": False},
    ),
    "nemotron_h-biases": (
        transformers.NemotronHConfig,
        NEMOTRON
        | {"num_hidden_layers": 4, "hybrid_override_pattern": "M*M-"}
        | {"use_bias": True, "mlp_bias": True},
    ),
    "kimi_linear": (transformers.KimiLinearConfig, KIMI),
    "kimi_linear-query-latent": (
        transformers.KimiLinearConfig,
        KIMI
        | {"q_lora_rank": 24, "linear_conv_kernel_dim": 3, "num_expert_group": 4, "topk_group": 2}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True},
    ),
    "bailing_hybrid": (transformers.BailingHybridConfig, LING),
    "bailing_hybrid-unbounded": (
        transformers.BailingHybridConfig,
        LING
        | {"kda_safe_gate": False, "q_lora_rank": None, "short_conv_kernel_size": 3}
        | {"attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "granite4-experts": (
        transformers.GraniteMoeHybridConfig,
        MAMBA
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "shared_intermediate_size": 96,
            "residual_multiplier": 0.3,
        },
    ),
    "granite4-mamba": (
        transformers.GraniteMoeHybridConfig,
        MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_n_groups": 1,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": None,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.4,
        },
    ),
    **hybrid_checkpoints.VARIANTS,
    **alias_checkpoints.VARIANTS,
}


def save_family(directory: Path, name: str, **changes: Any) -> Path:
    """A checkpoint of a variant of two layers, or as many as it needs."""
    if name in hybrid_checkpoints.VARIANTS:
        return hybrid_checkpoints.save_hybrid(directory, name, **changes)
    if name in alias_checkpoints.VARIANTS:
        return alias_checkpoints.save_alias(directory, name, **changes)
    kind, own = VARIANTS[name]
    sizes = TINY | {"num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0}
    save_random_model(directory, kind(**sizes | own | changes))
    recurrent = name.startswith(RECURRENT)
    return hybrid_checkpoints.forgetting_slowly(directory) if recurrent else directory
