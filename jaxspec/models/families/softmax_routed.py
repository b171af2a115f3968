"""Families with experts that a softmax weighs: Qwen1.5-MoE and Qwen2-MoE, the text model of
Qwen3-VL with experts, OLMoE, and Granite 3 with experts."""

import dataclasses

from jaxspec.config.experts import ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.dense import GRANITE, read_granite
from jaxspec.models.families.family import Family, Keys, attention_of, dense_of, model_of, sizes
from jaxspec.models.families.rope import rope_of, without_image_positions
from jaxspec.models.families.routed import (
    QWEN3_MOE,
    every_few,
    map_experts,
    under_either_name,
    with_experts,
)
from jaxspec.models.families.windows import FULL, SLIDING, windows_by_kind
from jaxspec.models.json.keys import words


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
    return map_experts(config, lambda mlp: dataclasses.replace(mlp, fused="halves"))


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


def _read_olmoe(hf: Keys) -> ModelConfig:
    """Norms over all heads of queries and of keys."""
    count = under_either_name(hf, "num_experts", "num_local_experts", 64)
    routing = RoutingConfig(count, hf["num_experts_per_tok"], normalize=hf["norm_topk_prob"])
    plain = attention_of(hf, rope_of(hf))
    attention = dataclasses.replace(plain, qk_norm=True, whole_qk_norm=True)
    return with_experts(hf, attention, ExpertsConfig(hf["intermediate_size"], routing))


OLMOE = Family(
    "OlmoeForCausalLM",
    _read_olmoe,
    keys=words("attention_bias"),
    defaults=sizes(50304, 2048, 2048, 16, 16, 16, 4096)
    | {"num_key_value_heads": None, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
    | {"num_experts": None, "num_local_experts": None, "num_experts_per_tok": 8}
    | {"norm_topk_prob": False},
    fixed={"clip_qkv": (None,)},
)


def _read_granite_moe(hf: Keys) -> ModelConfig:
    """Granite's multipliers, and the softmax over the chosen experts."""
    routing = RoutingConfig(hf["num_local_experts"], hf["num_experts_per_tok"], "chosen")
    experts = ExpertsConfig(hf["intermediate_size"], routing, fused="stacked")
    return read_granite(hf).map_layers(lambda layer: dataclasses.replace(layer, mlp=experts))


# What tensors of Granite's experts are called.
OF_GRANITE = (
    (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
)
GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    _read_granite_moe,
    keys=words("attention_bias"),
    defaults=dict(GRANITE.defaults) | {"num_local_experts": 8, "num_experts_per_tok": 2},
    renames=OF_GRANITE,
)
