"""Qwen3-Next and Qwen 3.5 (text): most layers are recurrent, every fourth is gated attention.

Norms multiply by 1 + w, except for those inside of recurrent layers. Qwen 3.5 rotates by three
positions, of time, height and width. In a text they are equal, so it is plain rotation.
"""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

from jaxspec.config.experts import ExpertNames, ExpertsConfig, Fused, RoutingConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import AFTER
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_multiple,
    dense_of,
    model_of,
    mtp_of,
)
from jaxspec.models.families.rope import rope_of, without_image_positions
from jaxspec.models.families.routed import every_few
from jaxspec.models.families.windows import FULL
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import shown

LINEAR = "linear_attention"

_Mlp = DenseConfig | ExpertsConfig


def _model(hf: Keys, mlps: Callable[[int], _Mlp], *, by_head: bool) -> ModelConfig:
    """Layers with the MLP that ``mlps`` gives for their index.

    Raises ValueError for kinds of layers, or numbers of MTP layers, that do not fit.
    """
    plain = attention_of(hf, rope_of(hf))
    attention = dataclasses.replace(plain, qk_norm=True, gate="entries")
    check_multiple(hf, "linear_num_value_heads", "linear_num_key_heads")
    recurrence = GatedDeltaConfig(
        num_key_heads=hf["linear_num_key_heads"],
        num_value_heads=hf["linear_num_value_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        taps=hf["linear_conv_kernel_dim"],
        by_head=by_head,
    )
    layers = [
        LayerConfig(attention if kind == FULL else recurrence, mlps(index))
        for index, kind in enumerate(_kinds(hf))
    ]
    model = model_of(hf, layers, norm_offset=1)
    mtp = mtp_of(hf, "qwen", AFTER, key="mtp_num_hidden_layers")
    for other in ("num_nextn_predict_layers", "num_mtp_layers"):
        if hf[other] and hf[other] != hf["mtp_num_hidden_layers"]:
            count = hf["mtp_num_hidden_layers"]
            raise ValueError(f"{other} is {shown(hf[other])}, and mtp_num_hidden_layers {count}")
    return dataclasses.replace(model, mtp=mtp)


def _kinds(hf: Keys) -> list[str]:
    """The kind of each layer. Raises ValueError for a bad list of them."""
    kinds, layers = hf["layer_types"], hf["num_hidden_layers"]
    if kinds is None:
        every = hf["full_attention_interval"]
        return [LINEAR if (index + 1) % every else FULL for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must be a list of {layers} kinds, got {shown(kinds)}")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ValueError(f"layer_types: {shown(kind)} is not supported")
    return kinds


def gated_experts(hf: Keys, *, normalize: bool, fused: Fused | None) -> ExpertsConfig:
    """Experts with a shared one, which is multiplied by a gate of the token."""
    return ExpertsConfig(
        hf["moe_intermediate_size"],
        RoutingConfig(hf["num_experts"], hf["num_experts_per_tok"], normalize=normalize),
        shared_size=hf["shared_expert_intermediate_size"],
        shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
        fused=fused,
    )


def _read_next(hf: Keys) -> ModelConfig:
    experts, dense = gated_experts(hf, normalize=hf["norm_topk_prob"], fused=None), dense_of(hf)
    has_experts = every_few(hf)
    return _model(hf, lambda i: experts if has_experts(i) else dense, by_head=True)


def _read_dense(hf: Keys) -> ModelConfig:
    mlp = dense_of(hf)
    return _model(hf, lambda _: mlp, by_head=False)


def _read_moe(hf: Keys) -> ModelConfig:
    experts = gated_experts(hf, normalize=True, fused="stacked")
    return _model(hf, lambda _: experts, by_head=False)


_KEYS = words("attention_bias")
_DEFAULTS = MappingProxyType(
    {
        "max_position_embeddings": 32768,
        "num_attention_heads": 16,
        "head_dim": 256,
        "eos_token_id": None,
        "partial_rotary_factor": 0.25,
        "layer_types": None,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "mtp_num_hidden_layers": 1,
    }
)
_MOE_DEFAULTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_FIXED = {
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "silu", "swish"),
    "mamba_ssm_dtype": (None, "float32"),
    "mtp_use_dedicated_embeddings": (None, False),
}
# Of models whose layers all have experts, or none of them.
_FIXED_MLPS = _FIXED | {
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "norm_topk_prob": (None, True),
}

QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    _read_next,
    keys=_KEYS,
    defaults={
        **_DEFAULTS,
        **_MOE_DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    fixed=_FIXED,
)
QWEN3_5_TEXT = Family(
    "Qwen3_5ForCausalLM",
    _read_dense,
    keys=_KEYS,
    defaults={
        **_DEFAULTS,
        "vocab_size": 248320,
        "intermediate_size": 12288,
        "num_key_value_heads": 4,
    },
    fixed=_FIXED_MLPS,
    rewrite=without_image_positions,
)
QWEN3_5_MOE_TEXT = Family(
    "Qwen3_5MoeForCausalLM",
    _read_moe,
    keys=_KEYS,
    defaults={
        **_DEFAULTS,
        **_MOE_DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    fixed=_FIXED_MLPS,
    rewrite=without_image_positions,
)
# Models of text and images, of which the text model is read.
QWEN3_5 = WithImages("Qwen3_5ForConditionalGeneration", {"qwen3_5_text": QWEN3_5_TEXT})
QWEN3_5_MOE = WithImages(
    "Qwen3_5MoeForConditionalGeneration", {"qwen3_5_moe_text": QWEN3_5_MOE_TEXT}
)
