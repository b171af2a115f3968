"""DeepSeek-V3: latent attention, and experts after the first layers."""

from jaxspec.config.latent import LatentConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.families.family import Family, Keys, check_agrees
from jaxspec.models.families.rope import rope_of, score_factor
from jaxspec.models.families.routed import after_dense, model_with_experts, sigmoid_experts
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_integer, shown

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _read(hf: Keys) -> ModelConfig:
    for name in _SIZES:
        if not is_positive_integer(hf[name]):
            raise ValueError(f"{name} must be a positive integer, got {shown(hf[name])}")
    if hf["q_lora_rank"] is not None and not is_positive_integer(hf["q_lora_rank"]):
        given = shown(hf["q_lora_rank"])
        raise ValueError(f"q_lora_rank must be a positive integer or null, got {given}")
    width = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
    check_agrees(hf, "qk_head_dim", width, "qk_nope_head_dim + qk_rope_head_dim")
    # Of the rotated part alone, as transformers writes it.
    check_agrees(hf, "head_dim", hf["qk_rope_head_dim"], "qk_rope_head_dim")
    heads = hf["num_attention_heads"]
    check_agrees(hf, "num_key_value_heads", heads, "num_attention_heads")
    rope_keys = {**hf, "head_dim": hf["qk_rope_head_dim"]}
    mixer = LatentConfig(
        num_heads=heads,
        rope=rope_of(rope_keys),
        latent=hf["kv_lora_rank"],
        key_dim=hf["qk_nope_head_dim"],
        value_dim=hf["v_head_dim"],
        query_latent=hf["q_lora_rank"],
        scale=width**-0.5 * score_factor(rope_keys),
        interleaved=hf["rope_interleave"],
        bias=hf["attention_bias"],
    )
    return model_with_experts(hf, mixer, sigmoid_experts(hf, 256), after_dense(hf))


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    _read,
    keys=words(
        """attention_bias kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim
        v_head_dim rope_interleave first_k_dense_replace moe_intermediate_size n_shared_experts
        n_routed_experts num_local_experts routed_scaling_factor n_group topk_group
        num_experts_per_tok norm_topk_prob ep_size aux_loss_alpha seq_aux"""
    ),
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "eos_token_id": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": None,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": None,
        "num_local_experts": None,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
    },
    fixed={
        "topk_method": (None, "noaux_tc"),
        "scoring_func": (None, "sigmoid"),
        "moe_layer_freq": (None, 1),
    },
)
