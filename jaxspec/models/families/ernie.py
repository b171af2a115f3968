"""ERNIE 4.5, dense and with experts: layers as Llama has them, which rotate neighbours in a head
together, and MTP layers."""

import dataclasses
from collections.abc import Callable

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import AFTER
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    dense_of,
    model_of,
    mtp_of,
    sizes,
)
from jaxspec.models.families.rope import rope_of
from jaxspec.models.families.routed import with_experts
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, shown


def _with_all_biases(raw: Keys) -> Keys:
    """ERNIE's one key for the biases of attention and MLPs, as two."""
    bias = raw.get("use_bias", False)
    return {**raw, "attention_bias": bias, "mlp_bias": bias}


def _attention(hf: Keys) -> AttentionConfig:
    return dataclasses.replace(attention_of(hf, rope_of(hf)), interleaved=True)


def _with_mtp(hf: Keys, model: ModelConfig) -> ModelConfig:
    """With MTP layers of dense MLPs, whose last norm is the model's: ernie4_5_mtp.py of FastDeploy
    has them so."""
    mtp = mtp_of(hf, "ernie", AFTER)
    if mtp is not None:
        layer = LayerConfig(_attention(hf), dense_of(hf))
        mtp = dataclasses.replace(mtp, layers=(layer,) * mtp.num_layers)
    return dataclasses.replace(model, mtp=mtp)


# Of MTP layers, whose number stands behind the part.
_OF_MTP = (r"^model\.mtp_(emb_norm|hidden_norm|linear_proj|block)\.(\d+)\.", r"model.mtp.\2.\1.")


def _read_dense(hf: Keys) -> ModelConfig:
    layer = LayerConfig(_attention(hf), dense_of(hf))
    return _with_mtp(hf, model_of(hf, [layer] * hf["num_hidden_layers"]))


ERNIE4_5 = Family(
    "Ernie4_5ForCausalLM",
    _read_dense,
    keys=words("use_bias"),
    defaults=sizes(103424, 1024, 3072, 18, 16, 2, 131072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    | {"tie_word_embeddings": True},
    rewrite=_with_all_biases,
    renames=(_OF_MTP,),
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


def _read_experts(hf: Keys) -> ModelConfig:
    """A softmax router with a correction for the choice."""
    routing = RoutingConfig(
        hf["moe_num_experts"], hf["moe_k"], "softmax", normalize=True, correction=True
    )
    width = hf["moe_intermediate_size"]
    experts = ExpertsConfig(width, routing, shared_size=hf["moe_num_shared_experts"] * width)
    return _with_mtp(hf, with_experts(hf, _attention(hf), experts, _few(hf)))


ERNIE4_5_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    _read_experts,
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
    renames=(
        (r"\.moe_statics\.e_score_correction_bias$", ".gate.e_score_correction_bias"),
        _OF_MTP,
    ),
)
