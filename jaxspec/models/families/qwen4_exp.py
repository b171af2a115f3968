"""Qwen3.8-Flash-Next (``qwen4_exp``, text): streams that are read through gates, the gated delta
rule in most layers, in the others attention to spans that an indexer chooses, embeddings of
n-grams, experts.

Norms multiply by 1 + w, except for those inside of recurrent layers.
"""

import dataclasses
from typing import Any

from jaxspec.config.indexer import MeanIndexerConfig
from jaxspec.config.mixers import IndexedAttentionConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import BEFORE, MtpConfig
from jaxspec.config.ngrams import NgramConfig
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.config.streams import GatedStreamsConfig
from jaxspec.models.families.family import (
    Family,
    Keys,
    attention_of,
    check_keys,
    check_multiple,
    model_of,
    mtp_of,
)
from jaxspec.models.families.ngram_tables import FLOAT8, ngrams_of
from jaxspec.models.families.qwen_hybrid import LINEAR, QWEN3_5_MOE_TEXT, gated_experts
from jaxspec.models.families.rope import PARTIAL, rope_of, without_image_positions
from jaxspec.models.families.windows import FULL
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_integer, is_positive_integer, shown

INDEXED = "indexed_attention"  # transformers' word for what files call full attention
_SIZES = words(
    """hc_count hc_lowrank ngram_size heads_per_ngram ngram_vocab_size_base split_ngram_parts
    make_ngram_vocab_size_divisible_by ple_conv_kernel_size indexer_n_heads indexer_head_dim
    indexer_budget indexer_compress_ratio"""
)


def _are_recurrent(hf: Keys) -> list[bool]:
    """Whether each layer is. Raises ValueError for a bad list of kinds."""
    kinds, count = hf["layer_types"], hf["num_hidden_layers"]
    if kinds is None:
        every = hf["full_attention_interval"]
        return [(index + 1) % every > 0 for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(f"layer_types must be a list of {count} kinds, got {shown(kinds)}")
    for kind in kinds:
        if kind not in (LINEAR, FULL, INDEXED):
            raise ValueError(f"layer_types: {shown(kind)} is not supported")
    return [kind == LINEAR for kind in kinds]


def _ngrams(hf: Keys) -> dict[int, NgramConfig]:
    """The n-grams of layers that have some, by index.

    Raises ValueError for what is no list of layers, which the key counts from 1.
    """
    given, count = hf["ple_layer_ids"], hf["num_hidden_layers"]
    given = [] if given is None else given
    if not isinstance(given, list) or not all(map(is_integer, given)):
        raise ValueError(f"ple_layer_ids must be a list of integers, got {shown(given)}")
    if any(not 1 <= layer <= count for layer in given):
        raise ValueError(f"ple_layer_ids must be from 1 to {count}, got {shown(given)}")
    recurrent = _are_recurrent(hf)
    for layer in given:
        if not recurrent[layer - 1]:
            raise ValueError(f"ple_layer_ids: layer {layer} must be one of {LINEAR}")
    numbered = enumerate(sorted(set(given)))
    return {layer - 1: ngrams_of(hf, index) for index, layer in numbered}


def _check_numbers(hf: Keys) -> None:
    for name in sorted(_SIZES):
        if not is_positive_integer(hf[name]):
            raise ValueError(f"{name} must be a positive integer, got {shown(hf[name])}")
    if not is_integer(hf["seed"]):
        raise ValueError(f"seed must be an integer, got {shown(hf['seed'])}")
    width = hf["ple_embed_dim"]
    if width is not None and not is_positive_integer(width):
        raise ValueError(f"ple_embed_dim must be a positive integer, got {shown(width)}")
    if hf["ple_embedding_dtype"] not in (None, "bfloat16", FLOAT8):
        given = shown(hf["ple_embedding_dtype"])
        raise ValueError(f"ple_embedding_dtype must be bfloat16 or {FLOAT8}, got {given}")
    if hf["output_gate_type"] not in (None, "silu", "swish", "sigmoid"):
        gate = shown(hf["output_gate_type"])
        raise ValueError(f"output_gate_type must be silu or sigmoid, got {gate}")


def _attention(hf: Keys) -> IndexedAttentionConfig:
    plain = attention_of(hf, rope_of(hf))
    return IndexedAttentionConfig(
        dataclasses.replace(plain, qk_norm=True, gate="entries"),
        MeanIndexerConfig(
            hf["indexer_budget"],
            hf["indexer_n_heads"],
            hf["indexer_head_dim"],
            hf["indexer_compress_ratio"],
        ),
    )


def _recurrence(hf: Keys) -> GatedDeltaConfig:
    check_multiple(hf, "linear_num_value_heads", "linear_num_key_heads")
    return GatedDeltaConfig(
        num_key_heads=hf["linear_num_key_heads"],
        num_value_heads=hf["linear_num_value_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        taps=hf["linear_conv_kernel_dim"],
        gate="sigmoid" if hf["output_gate_type"] == "sigmoid" else "silu",
    )


def _mtp(hf: Keys) -> MtpConfig | None:
    """The MTP layers, as two keys may count them.

    Raises ValueError for those of another kind than the model's attention layers.
    """
    told, count = hf["mtp"], hf["mtp_num_hidden_layers"]
    if told is not None:
        if not isinstance(told, dict):
            raise ValueError(f"mtp must be an object, got {shown(told)}")
        known = words("hybrid layer_types num_hidden_layers rope_theta")
        check_keys(told, known, {"hybrid": (None, True)}, "mtp")
        layers, theta = told.get("num_hidden_layers"), told.get("rope_theta")
        if layers not in (None, count):
            raise ValueError(
                f"mtp has {shown(layers)} layers, and mtp_num_hidden_layers is {shown(count)}"
            )
        kinds = told.get("layer_types")
        if kinds is not None and kinds not in ([kind] * count for kind in (FULL, INDEXED)):
            raise ValueError(f"mtp: layer_types must be {count} times {FULL}, got {shown(kinds)}")
        if theta not in (None, rope_of(hf).theta):
            raise ValueError(f"mtp: rope_theta {shown(theta)} is not that of the model")
    return mtp_of(hf, "qwen4_exp", BEFORE, key="mtp_num_hidden_layers")


def _read(hf: Keys) -> ModelConfig:
    _check_numbers(hf)
    attention, recurrence, ngrams = _attention(hf), _recurrence(hf), _ngrams(hf)
    shared: dict[str, Any] = {
        "mlp": gated_experts(hf, normalize=hf["norm_topk_prob"], fused="stacked"),
        "norms": "none",
        "streams": GatedStreamsConfig(hf["hc_count"], hf["hc_lowrank"]),
    }
    layers = [
        LayerConfig(recurrence if recurrent else attention, ngrams=ngrams.get(index), **shared)
        for index, recurrent in enumerate(_are_recurrent(hf))
    ]
    mtp = _mtp(hf)
    if mtp is not None:  # its layers have attention, and no n-grams
        mtp = dataclasses.replace(mtp, layers=(LayerConfig(attention, **shared),) * mtp.num_layers)
    return dataclasses.replace(model_of(hf, layers, norm_offset=1), mtp=mtp)


QWEN4_EXP_TEXT = Family(
    "Qwen4ExpForCausalLM",
    _read,
    keys=words("attention_bias number_of_conv_states"),
    defaults=dict(QWEN3_5_MOE_TEXT.defaults)
    | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, PARTIAL: 1.0}
    | {"output_gate_type": None, "mtp": None, "hc_count": 4, "hc_lowrank": 320}
    | {"ple_layer_ids": None, "ple_embed_dim": None, "ple_conv_kernel_size": 4}
    | {"ple_embedding_dtype": None}
    | {"ngram_size": 3, "heads_per_ngram": 8}
    | {"ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128}
    | {"seed": 1234, "split_ngram_parts": 512, "indexer_n_heads": None, "indexer_head_dim": None}
    | {"indexer_budget": None, "indexer_compress_ratio": None},
    fixed={
        "attn_output_gate": (None, True),
        "mamba_ssm_dtype": (None, "float32"),
        "mtp_use_dedicated_embeddings": (None, False),
        "indexer_kv_heads": (None, 1),
    },
    rewrite=without_image_positions,
    renames=((r"^mtp\.hyper_connection_mixer\.", "mtp.layers.0.hyper_connection_mixer."),),
)
QWEN4_EXP = WithImages(
    "Qwen4ExpForConditionalGeneration",
    {"qwen4_exp_text": QWEN4_EXP_TEXT},
    agreeing=("eos_token_id",),
)
