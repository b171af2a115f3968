"""Nemotron-H and Nemotron 3: layers of one block each, a mixer (Mamba-2 or attention) or an MLP
(dense or of experts).

Attention does not rotate, and MLPs have no gate. Experts may read and write a latent vector in
place of hidden states. MTP layers have a mixer and an MLP, in checkpoints as two layers.

transformers 5.24 takes steps of Mamba-2 to be at least ``time_step_min`` in prompts, but not where
it reads single tokens. Here they are as they are in both.
"""

import dataclasses
from types import MappingProxyType
from typing import Any

from jaxspec.config.experts import ExpertsConfig, SquaredRelu
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.config.recurrent import Mamba2Config
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_agrees,
    dense_of,
    model_of,
    mtp_of,
    sizes,
)
from jaxspec.models.families.mamba_hybrid import MAMBA_FIXED
from jaxspec.models.families.rope import rope_of, without_rope
from jaxspec.models.families.routed import sigmoid_routing
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_integer, shown

KINDS = MappingProxyType({"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"})
# As transformers 5 writes them.
_NEWER = MappingProxyType({"linear_attention": "mamba", "full_attention": "attention"})
_OF_MTP = ["attention", "moe"]


def _kinds(hf: Keys, names: tuple[str, ...], pattern: str, default: list[str]) -> list[str]:
    """The kinds of layers by a list under one of these names, or else by a pattern of letters.

    Raises ValueError for unknown kinds.
    """
    given: Any = next((hf[name] for name in names if hf[name] is not None), None)
    if given is not None:
        kinds = [_NEWER.get(kind, kind) for kind in given] if isinstance(given, list) else [given]
        if any(kind not in KINDS.values() for kind in kinds):
            raise ValueError(
                f"{names[0]} must be a list of {', '.join(KINDS.values())}, got {shown(given)}"
            )
        return kinds
    letters = hf[pattern]
    if letters is None:
        return default
    if not isinstance(letters, str) or not set(letters) <= KINDS.keys():
        raise ValueError(f"{pattern} must be letters of {''.join(KINDS)}, got {shown(letters)}")
    return [KINDS[letter] for letter in letters]


def _kinds_of_layers(hf: Keys) -> list[str]:
    """Raises ValueError for another number of layers than the model has."""
    names = "layers_block_type", "layer_types"
    kinds = _kinds(hf, names, "hybrid_override_pattern", [*KINDS.values()])
    count = len(kinds) if hf["num_hidden_layers"] is None else hf["num_hidden_layers"]
    if not kinds or count != len(kinds):
        raise ValueError(f"num_hidden_layers is {count}, and {len(kinds)} layers are described")
    return kinds


def _attention(hf: Keys) -> AttentionConfig:
    plain = attention_of(hf, without_rope(rope_of(hf)))
    check_agrees(hf, "attention_head_dim", plain.head_dim, "head_dim")
    return plain


def _mamba(hf: Keys) -> Mamba2Config:
    return Mamba2Config(
        num_groups=hf["n_groups"],
        num_heads=hf["mamba_num_heads"],
        state_dim=hf["ssm_state_size"],
        head_dim=hf["mamba_head_dim"],
        taps=hf["conv_kernel"],
        taps_bias=hf["use_conv_bias"],
        bias=hf["use_bias"],
    )


def _dense(hf: Keys) -> DenseConfig:
    return dataclasses.replace(dense_of(hf), activation=SquaredRelu())


def _experts(hf: Keys) -> ExpertsConfig:
    """Raises ValueError for biases, and for a latent vector of no size."""
    if hf["mlp_bias"]:
        raise ValueError("mlp_bias is supported in a model without experts only")
    latent = hf["moe_latent_size"]
    if latent is not None and not is_positive_integer(latent):
        raise ValueError(f"moe_latent_size must be a positive integer or null, got {shown(latent)}")
    return ExpertsConfig(
        hf["moe_intermediate_size"],
        sigmoid_routing(hf, hf["n_routed_experts"]),
        shared_size=hf["moe_shared_expert_intermediate_size"],
        activation=SquaredRelu(),
        shared_activation=SquaredRelu(),
        latent=latent,
        fused="stacked",
    )


def _layer(hf: Keys, kind: str) -> LayerConfig:
    match kind:
        case "mamba":
            return LayerConfig(_mamba(hf), None)
        case "attention":
            return LayerConfig(_attention(hf), None)
        case "mlp":
            return LayerConfig(None, _dense(hf))
    return LayerConfig(None, _experts(hf))


def _mtp(hf: Keys) -> MtpConfig | None:
    """Raises ValueError for MTP layers that are not attention and experts, and for several."""
    mtp = mtp_of(hf, "nemotron", AFTER)
    if mtp is None:
        return None
    kinds = _kinds(hf, ("mtp_layers_block_type",), "mtp_hybrid_override_pattern", _OF_MTP)
    if mtp.num_layers > 1 or kinds != _OF_MTP:
        raise ValueError(
            "MTP layers are supported with num_nextn_predict_layers 1 and "
            "mtp_hybrid_override_pattern *E: set num_nextn_predict_layers to 0 to do without them"
        )
    return dataclasses.replace(mtp, layers=(LayerConfig(_attention(hf), _experts(hf)),))


def _read(hf: Keys) -> ModelConfig:
    """Raises ValueError for keys that contradict each other, and for what is not supported."""
    epsilon = hf["layer_norm_epsilon"]
    for other in ("rms_norm_eps", "norm_eps"):
        check_agrees(hf, other, epsilon, "layer_norm_epsilon")
    layers = [_layer(hf, kind) for kind in _kinds_of_layers(hf)]
    model = model_of({**hf, "rms_norm_eps": epsilon}, layers)
    return dataclasses.replace(model, mtp=_mtp(hf))


NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    _read,
    keys=words(  # of training, or of how other programs keep and compute
        """mlp_bias expand chunk_size num_logits_to_keep use_mamba_kernels hidden_dropout
        rescale_prenorm_residual time_step_min time_step_max time_step_floor time_step_rank
        mamba_ssm_cache_dtype moe_shared_expert_overlap"""
    ),
    defaults=sizes(131072, 4096, 21504, 32, 32, 8, 4096)
    | {"num_hidden_layers": None, "layers_block_type": None, "layer_types": None}
    | {"hybrid_override_pattern": None}
    | {"layer_norm_epsilon": 1e-5, "rms_norm_eps": None, "norm_eps": None}
    | {"head_dim": 128, "attention_head_dim": None}
    | {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8}
    | {"conv_kernel": 4, "use_conv_bias": True, "use_bias": False}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
    | {"moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None}
    | {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    | {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": None},
    fixed=dict(MAMBA_FIXED)
    | {"mamba_hidden_act": (None, "silu"), "mlp_hidden_act": (None, "relu2")}
    | {"mamba_proj_bias": (None, False), "residual_in_fp32": (None, False)}
    | {"n_shared_experts": (None, 1)},
    renames=(
        # The second layer of an MTP layer has its MLP and its last norm.
        (r"^mtp\.layers\.1\.norm\.", "mtp.layers.0.post_attention_layernorm."),
        (r"^mtp\.layers\.1\.mixer\.", "mtp.layers.0.mlp."),
        (r"^mtp\.layers\.1\.", "mtp.layers.0."),
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"(\blayers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.mixer\.(in_proj|out_proj|conv1d|norm|A_log|D|dt_bias)\b", r".mamba.\1"),
        (r"\.mixer\.", ".mlp."),
    ),
)
