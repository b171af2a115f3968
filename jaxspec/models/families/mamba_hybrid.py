"""Families of Mamba-2 layers beside attention: Bamba, and Granite 4 with experts or without."""

import dataclasses
from types import MappingProxyType

from jaxspec.config.experts import ExpertNames, ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.recurrent import Mamba2Config
from jaxspec.models.families.dense import GRANITE, read_granite
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_agrees,
    dense_of,
    model_of,
    sizes,
)
from jaxspec.models.families.rope import rope_of, without_rope
from jaxspec.models.families.softmax_routed import OF_GRANITE
from jaxspec.models.families.windows import FULL
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, shown

# Names of the kinds of layers, as published and as transformers 5 writes them.
ATTENTION, MAMBA = ("attention", FULL), ("mamba", "linear_attention")
MAMBA_DEFAULTS = MappingProxyType(
    {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
)
MAMBA_FIXED = MappingProxyType(
    {  # infinity as transformers writes it, and as other programs do
        "time_step_limit": (None, [0.0, {"__float__": "Infinity"}], [0.0, float("inf")])
    }
)


def mamba_of(hf: Keys, width: int | None = None, said: str = "") -> Mamba2Config:
    """Mamba-2 of this width, which the key ``said`` has; None: of mamba_expand * hidden_size.

    Raises ValueError for heads that do not fit the width of the layer.
    """
    heads = hf["mamba_n_heads"]
    if width is None:
        width, said = hf["mamba_expand"] * hf["hidden_size"], "mamba_expand * hidden_size"
    if width % heads:
        raise ValueError(f"{said} ({width}) must be a multiple of mamba_n_heads ({heads})")
    size = hf["mamba_d_head"]
    if size not in (None, "auto", width // heads):
        raise ValueError(
            f"mamba_d_head = {shown(size)} contradicts {said} / mamba_n_heads "
            f"(= {width // heads}); correct one of them"
        )
    return Mamba2Config(
        num_groups=hf["mamba_n_groups"],
        num_heads=heads,
        state_dim=hf["mamba_d_state"],
        head_dim=width // heads,
        taps=hf["mamba_d_conv"],
        taps_bias=hf["mamba_conv_bias"],
        bias=hf["mamba_proj_bias"],
    )


def _read_bamba(hf: Keys) -> ModelConfig:
    """Raises ValueError for a bad list of the layers that have attention, and for a part of a head
    that is rotated other than half of it, which transformers never reads."""
    given, count = hf["attn_layer_indices"], hf["num_hidden_layers"]
    indices = [] if given is None else given
    known = isinstance(indices, list) and all(map(is_integer, indices))
    if not known or not all(0 <= index < count for index in indices):
        raise ValueError(
            f"attn_layer_indices must be a list of indices below {count}, got {shown(given)}"
        )
    attention, mamba = attention_of(hf, rope_of(hf)), mamba_of(hf)
    rotated = attention.rope.rotary_dim
    if rotated != attention.head_dim // 2:
        raise ValueError("partial_rotary_factor of rope parameters must be 0.5 in a bamba model")
    check_agrees(hf, "attn_rotary_emb", rotated, "half of a head")
    mixers = (attention if index in indices else mamba for index in range(count))
    return model_of(hf, [LayerConfig(mixer, dense_of(hf)) for mixer in mixers])


BAMBA = Family(
    "BambaForCausalLM",
    _read_bamba,
    keys=words("attention_bias mlp_bias mamba_chunk_size num_logits_to_keep z_loss_coefficient")
    | words("use_mamba_kernels"),
    defaults=dict(MAMBA_DEFAULTS)
    | sizes(128000, 4096, 14336, 32, 32, 8, 262144)
    | {"rms_norm_eps": 1e-5, "attn_layer_indices": None, "attn_rotary_emb": None}
    | {"partial_rotary_factor": 0.5},
    fixed=dict(MAMBA_FIXED) | {"partial_rotary_factor": (0.5,)},
    renames=(
        (r"^model\.final_layernorm\.", "model.norm."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
    ),
)


def _checked(raw: Keys) -> Keys:
    """Granite 4's config, with null for the number of experts where there are none.

    Raises ValueError for unknown kinds of layers or positions.
    """
    kinds = raw.get("layer_types", raw.get("layers_block_type"))
    if not isinstance(kinds, list) or any(kind not in ATTENTION + MAMBA for kind in kinds):
        raise ValueError(
            f"layer_types = {shown(kinds)} is not supported, only a list of {ATTENTION[0]!r} and "
            f"{MAMBA[0]!r}"
        )
    count = raw.get("num_hidden_layers", 32)
    if is_positive_integer(count) and len(kinds) != count:
        raise ValueError(f"layer_types has {len(kinds)} entries for {count} layers")
    if raw.get("position_embedding_type") not in (None, "rope", "nope"):
        given = shown(raw["position_embedding_type"])
        raise ValueError(
            f"position_embedding_type {given} is not supported, only 'rope', 'nope' or null"
        )
    experts = {"num_local_experts": None, "num_experts_per_tok": None}
    if raw.get("num_local_experts") != 0:
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        experts |= {name: raw[name] for name in experts if name in raw}
    return {**raw, **experts, "layer_types": kinds}


def _granite4_mlp(hf: Keys) -> DenseConfig | ExpertsConfig:
    """The MLP that all tokens go through, beside experts if there are any."""
    width, count = hf["shared_intermediate_size"], hf["num_local_experts"]
    if count is None:
        return DenseConfig(width, fused=True)
    return ExpertsConfig(
        hf["intermediate_size"],
        RoutingConfig(count, hf["num_experts_per_tok"], "chosen"),
        shared_size=width,
        shared_fused=True,
        names=ExpertNames(shared=""),
        fused="stacked",
    )


def _read_granite4(hf: Keys) -> ModelConfig:
    mlp, model, kinds = _granite4_mlp(hf), read_granite(hf), hf["layer_types"]

    def changed(layer: LayerConfig, kind: str) -> LayerConfig:
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig)
        if kind in MAMBA:
            return dataclasses.replace(layer, mixer=mamba_of(hf), mlp=mlp)
        if hf["position_embedding_type"] != "rope":
            mixer = dataclasses.replace(mixer, rope=without_rope(mixer.rope))
        return dataclasses.replace(layer, mixer=mixer, mlp=mlp)

    layers = map(changed, model.layers, kinds)
    return dataclasses.replace(model, layers=tuple(layers))


GRANITE4 = Family(
    "GraniteMoeHybridForCausalLM",
    _read_granite4,
    keys=words("attention_bias layers_block_type mamba_chunk_size init_method"),
    defaults=dict(GRANITE.defaults)
    | MAMBA_DEFAULTS
    | {"shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None}
    | {"num_local_experts": None, "num_experts_per_tok": None},
    fixed=dict(MAMBA_FIXED) | {"normalization_function": (None, "rmsnorm")},
    rewrite=_checked,
    renames=(
        (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
        *OF_GRANITE,
    ),
)
