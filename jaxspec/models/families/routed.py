"""Families with experts: Mixtral, Qwen3 with experts, DeepSeek-V3, GLM-4.5 and 4.6, gpt-oss."""

import dataclasses
from collections.abc import Callable

from jaxspec.config.experts import ClampedSwiglu, ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import LatentConfig, MixerConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.rope import YarnRopeScaling
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_agrees,
    dense_of,
    model_of,
)
from jaxspec.models.families.rope import rope_of, score_factor
from jaxspec.models.families.windows import window_of, windows_of_most
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, shown


def with_experts(
    hf: Keys,
    mixer: MixerConfig,
    experts: ExpertsConfig,
    has_experts: Callable[[int], bool] = lambda layer: True,
) -> ModelConfig:
    """A model of layers with the same mixer, and experts where ``has_experts(layer)`` says so;
    dense MLPs elsewhere."""
    dense = dense_of(hf)
    mlps = (experts if has_experts(i) else dense for i in range(hf["num_hidden_layers"]))
    return model_of(hf, [LayerConfig(mixer, mlp) for mlp in mlps])


def after_dense(hf: Keys) -> Callable[[int], bool]:
    """Which layers have experts where the first ones do not. Raises ValueError for a bad number."""
    first = hf["first_k_dense_replace"]
    if not is_integer(first) or first < 0:
        raise ValueError(f"first_k_dense_replace must be an integer from 0 on, got {shown(first)}")
    return lambda layer: layer >= first


def by_kind(hf: Keys) -> Callable[[int], bool]:
    """Which layers have experts: those that ``mlp_layer_types`` calls sparse, or else all but the
    first ones. Raises ValueError for what is no list of the model's layers."""
    kinds, count = hf.get("mlp_layer_types"), hf["num_hidden_layers"]
    if kinds is None:
        return after_dense(hf)
    if not isinstance(kinds, list) or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(f"mlp_layer_types must be a list of dense and sparse, got {shown(kinds)}")
    if len(kinds) != count:
        raise ValueError(f"mlp_layer_types has {len(kinds)} entries for {count} layers")
    return lambda layer: kinds[layer] == "sparse"


def every_few(hf: Keys) -> Callable[[int], bool]:
    """Which layers have experts: every ``decoder_sparse_step``-th, but none of
    ``mlp_only_layers``. Raises ValueError for what is no list of the model's layers."""
    dense, step = hf["mlp_only_layers"] or [], hf["decoder_sparse_step"]
    if not isinstance(dense, list) or not all(map(is_integer, dense)):
        raise ValueError(f"mlp_only_layers must be a list of integers, got {shown(dense)}")
    count = hf["num_hidden_layers"]
    if others := [layer for layer in dense if not 0 <= layer < count]:
        raise ValueError(f"mlp_only_layers has {shown(others)}, and the model {count} layers")
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def map_experts(
    config: ModelConfig, change: Callable[[ExpertsConfig], ExpertsConfig]
) -> ModelConfig:
    """The same with other experts."""

    def changed(layer: LayerConfig) -> LayerConfig:
        mlp = layer.mlp
        if not isinstance(mlp, ExpertsConfig):
            return layer
        return dataclasses.replace(layer, mlp=change(mlp))

    return config.map_layers(changed)


def sigmoid_routing(hf: Keys, num_experts: int) -> RoutingConfig:
    """A router of so many experts as DeepSeek-V3 has it."""
    return RoutingConfig(
        num_experts,
        hf["num_experts_per_tok"],
        "sigmoid",
        normalize=hf["norm_topk_prob"],
        scale=float(hf["routed_scaling_factor"]),
        num_groups=hf["n_group"],
        top_groups=hf["topk_group"],
        correction=True,
    )


def sigmoid_experts(hf: Keys, num_experts: int) -> ExpertsConfig:
    """Experts as DeepSeek-V3 has them; ``num_experts`` if the config does not say how many."""
    count = under_either_name(hf, "n_routed_experts", "num_local_experts", num_experts)
    routing = sigmoid_routing(hf, count)
    width = hf["moe_intermediate_size"]
    return ExpertsConfig(width, routing, shared_size=hf["n_shared_experts"] * width)


def under_either_name(hf: Keys, published: str, saved: str, default: int) -> int:
    """A value that published configs have under one name, and those that transformers 5 saves under
    another. Raises ValueError for two values."""
    given = {hf[name] for name in (published, saved)} - {None}
    if len(given) > 1:
        raise ValueError(f"{published} and {saved} must be equal, got {hf[published]}, {hf[saved]}")
    return given.pop() if given else default


def _read_mixtral(hf: Keys) -> ModelConfig:
    routing = RoutingConfig(hf["num_local_experts"], hf["num_experts_per_tok"], normalize=True)
    names = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
    experts = ExpertsConfig(hf["intermediate_size"], routing, names=names)
    return with_experts(hf, attention_of(hf, rope_of(hf), window_of(hf)), experts)


MIXTRAL = Family(
    "MixtralForCausalLM",
    _read_mixtral,
    keys=words("sliding_window"),
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)


def _read_qwen3(hf: Keys) -> ModelConfig:
    # All layers have the window; max_window_layers has no effect, as in transformers.
    plain = attention_of(hf, rope_of(hf), window_of(hf))
    routing = RoutingConfig(
        under_either_name(hf, "num_experts", "num_local_experts", 128),
        hf["num_experts_per_tok"],
        normalize=hf["norm_topk_prob"],
    )
    experts = ExpertsConfig(hf["moe_intermediate_size"], routing)
    return with_experts(hf, dataclasses.replace(plain, qk_norm=True), experts, every_few(hf))


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    _read_qwen3,
    keys=words("attention_bias max_window_layers"),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "eos_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": None,
        "num_local_experts": None,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
)


def latent_of(hf: Keys) -> LatentConfig:
    """Latent attention. Raises ValueError for sizes that are none, or contradict each other."""
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
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
    return LatentConfig(
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


def read_deepseek(hf: Keys) -> ModelConfig:
    """Latent attention, and experts after the first layers."""
    return with_experts(hf, latent_of(hf), sigmoid_experts(hf, 256), by_kind(hf))


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    read_deepseek,
    keys=words("attention_bias ep_size aux_loss_alpha seq_aux"),
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


def _read_glm4(hf: Keys) -> ModelConfig:
    """Experts chosen as DeepSeek-V3's are, grouped KV heads, partial rotary."""
    plain = attention_of(hf, rope_of(hf))
    attention = dataclasses.replace(plain, o_bias=False, qk_norm=hf["use_qk_norm"])
    return with_experts(hf, attention, sigmoid_experts(hf, 128), after_dense(hf))


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    _read_glm4,
    keys=words("attention_bias"),
    defaults={
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "eos_token_id": None,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "n_routed_experts": None,
        "num_local_experts": None,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
)


def _read_gpt_oss(hf: Keys) -> ModelConfig:
    """Experts with an activation of their own, attention sinks, alternating windows, yarn."""
    experts, rope = _gpt_oss_experts(hf), rope_of(hf)
    if isinstance(rope.scaling, YarnRopeScaling):
        original = rope.scaling.original_max_position
        check_agrees(hf, "initial_context_length", original, "original_max_position_embeddings")
    attention = dataclasses.replace(attention_of(hf, rope), sinks=True)
    mixers = (dataclasses.replace(attention, window=size) for size in windows_of_most(hf, 2))
    return model_of(hf, [LayerConfig(mixer, experts) for mixer in mixers])


def _gpt_oss_experts(hf: Keys) -> ExpertsConfig:
    routing = RoutingConfig(
        under_either_name(hf, "num_local_experts", "num_experts", 128),
        under_either_name(hf, "num_experts_per_tok", "experts_per_token", 4),
        "chosen",
        bias=True,
    )
    return ExpertsConfig(
        hf["intermediate_size"],
        routing,
        activation=ClampedSwiglu(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"])),
        bias=True,
        names=ExpertNames(router="router"),
        fused="interleaved",
    )


GPT_OSS = Family(
    "GptOssForCausalLM",
    _read_gpt_oss,
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "eos_token_id": None,
        "initial_context_length": None,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": None,
        "num_experts": None,
        "num_experts_per_tok": None,
        "experts_per_token": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
