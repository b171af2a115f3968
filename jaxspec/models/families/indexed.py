"""Families whose tokens attend to the positions that an indexer chooses: DeepSeek-V3.2 and GLM-5.

Else they are as DeepSeek-V3. In some of GLM-5's layers the indexer of an earlier layer counts.
"""

import dataclasses
from typing import Any

from jaxspec.config.indexer import IndexerConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import Keys, check_agrees, sizes
from jaxspec.models.families.routed import DEEPSEEK_V3, read_deepseek
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import check_flag, is_integer, is_positive_integer, shown

KINDS = ("indexed_attention", "deepseek_sparse_attention")  # both names of transformers
_LETTERS = {"F": "full", "S": "shared"}


def shared_layers(hf: Keys) -> list[bool]:
    """Whether the indexer of an earlier layer counts, for each layer. Three keys may say so.

    Raises ValueError for what is no list of the model's layers, for a first layer that shares, and
    for keys that contradict each other.
    """
    count, told = hf["num_hidden_layers"], {}
    if hf["indexer_types"] is not None:
        told["indexer_types"] = _kinds("indexer_types", hf["indexer_types"], count)
    if (pattern := hf["index_topk_pattern"]) is not None:
        kinds = [_LETTERS.get(kind, kind) for kind in pattern] if _is_list(pattern) else pattern
        told["index_topk_pattern"] = _kinds("index_topk_pattern", kinds, count)
    if hf["index_topk_freq"] is not None or not told:
        told["index_topk_freq"] = _by_distance(hf, count)
    (name, first), *others = told.items()
    for other, kinds in others:
        if kinds != first:
            raise ValueError(f"{other} contradicts {name}: correct one of them, or remove {other}")
    if first[0]:
        raise ValueError(f"{name}: the first layer must be full, as there is none before it")
    return first


def _is_list(value: Any) -> bool:
    return isinstance(value, list | str)


def _kinds(name: str, kinds: Any, count: int) -> list[bool]:
    if not isinstance(kinds, list) or any(kind not in _LETTERS.values() for kind in kinds):
        raise ValueError(f"{name} must be a list of full and shared, got {shown(kinds)}")
    if len(kinds) != count:
        raise ValueError(f"{name} has {len(kinds)} entries for {count} layers")
    return [kind == "shared" for kind in kinds]


def _by_distance(hf: Keys, count: int) -> list[bool]:
    """Every few layers have an indexer, and those before a first one."""
    every, first = hf["index_topk_freq"], hf["index_skip_topk_offset"]
    every = 1 if every is None else every
    if not is_positive_integer(every):
        raise ValueError(f"index_topk_freq must be a positive integer, got {shown(every)}")
    if not is_integer(first):
        raise ValueError(f"index_skip_topk_offset must be an integer, got {shown(first)}")
    return [max(layer - first + 1, 0) % every > 0 for layer in range(count)]


def _read_indexed(hf: Keys) -> ModelConfig:
    for name in ("index_topk", "index_n_heads", "index_head_dim"):
        if not is_positive_integer(hf[name]):
            raise ValueError(f"{name} must be a positive integer, got {shown(hf[name])}")
    kinds, count = hf["layer_types"], hf["num_hidden_layers"]
    if kinds is not None and all(kinds != [kind] * count for kind in KINDS):
        raise ValueError(
            f"layer_types = {shown(kinds)} is not supported, only {KINDS[0]!r} in every layer"
        )
    if hf["num_experts"] is not None:
        check_agrees(hf, "num_experts", hf["n_routed_experts"], "n_routed_experts")
    indexer = IndexerConfig(
        hf["index_topk"],
        hf["index_n_heads"],
        hf["index_head_dim"],
        check_flag("indexer_rope_interleave", hf["indexer_rope_interleave"]),
    )
    model, shared = read_deepseek(hf), shared_layers(hf)

    def changed(layer: LayerConfig, shared: bool) -> LayerConfig:
        assert isinstance(layer.mixer, LatentConfig)
        changed_indexer = dataclasses.replace(indexer, shared=shared)
        return dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, indexer=changed_indexer)
        )

    layers, mtp = tuple(map(changed, model.layers, shared)), model.mtp
    if mtp is not None:  # its layers have indexers, whatever the last layer has
        mtp = dataclasses.replace(mtp, layers=(changed(layers[-1], False),) * mtp.num_layers)
    return dataclasses.replace(model, layers=layers, mtp=mtp)


def _without_head_dim(raw: Keys) -> Keys:
    """transformers puts ``qk_rope_head_dim`` in its place; GLM-5.2's is ``qk_nope_head_dim``."""
    return {**raw, "head_dim": None}


DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    read=_read_indexed,
    keys=DEEPSEEK_V3.keys | words("index_share_for_mtp_iteration"),  # of drafts, not of the text
    defaults=dict(DEEPSEEK_V3.defaults)
    | {"max_position_embeddings": 163840, "mlp_layer_types": None, "layer_types": None}
    | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    | {"indexer_rope_interleave": False, "indexer_types": None, "index_topk_pattern": None}
    | {"index_topk_freq": None, "index_skip_topk_offset": 2, "num_experts": None},
    fixed={**DEEPSEEK_V3.fixed, "moe_router_dtype": (None, "float32")},
    rewrite=_without_head_dim,
)
GLM_MOE_DSA = dataclasses.replace(
    DEEPSEEK_V32,
    architecture="GlmMoeDsaForCausalLM",
    defaults=dict(DEEPSEEK_V32.defaults)
    | sizes(154880, 6144, 12288, 78, 64, 64, 202752)
    | {"rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}
    | {"n_group": 1, "topk_group": 1, "index_n_heads": 32, "indexer_rope_interleave": True},
)
