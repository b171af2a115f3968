"""``config.json`` of block heads, read and written: DFlash's (z-lab/dflash), and DeepSpec's, which
are of DSpark heads and of DFlash heads that were trained like them.

The layers are Qwen3's, without windows. An unknown key is an error.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from jaxspec.config.model import ModelConfig
from jaxspec.models.families.family import check_keys
from jaxspec.models.from_config.head_keys import check_head_keys
from jaxspec.models.from_config.model import parse_model_config, to_hf_config
from jaxspec.models.heads import BlockConfig, BlockHead
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import check_flag, is_integer, is_positive_integer, shown

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
# Keys that the layers do not have. ``auto_map`` names code, ``num_anchors`` is for training.
_SHARED_KEYS = words("block_size num_target_layers auto_map")
_OPTION_KEYS = words("target_layer_ids mask_token_id")
_DSPARK_KEYS = _OPTION_KEYS | words(
    """num_anchors enable_confidence_head confidence_head_with_markov markov_rank
    markov_head_type"""
)
_DFLASH_FIXED = {"causal": (None, False)}


def says_block(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a block head's, supported or not."""
    names = raw.get("architectures")
    named = shown(names) if isinstance(names, list | str) else ""
    return "dflash_config" in raw or "DFlash" in named or "DSpark" in named


def block_config(raw: Mapping[str, Any], target: ModelConfig) -> BlockConfig:
    """The BlockConfig of a block head's ``config.json``.

    Raises ValueError for a head that does not fit the target or has unsupported features.
    """
    names = raw.get("architectures")
    if names not in ([DFLASH], [DSPARK]):
        raise ValueError(
            f"architectures {shown(names)} is not a supported block drafter, only {DFLASH} and "
            f"{DSPARK}"
        )
    dspark = names == [DSPARK]
    format_keys = _SHARED_KEYS | (_DSPARK_KEYS if dspark else {"dflash_config"})
    options = raw if dspark else _nested(raw)
    model = _layers({key: value for key, value in raw.items() if key not in format_keys})
    rank = _markov_rank(raw) if dspark else 0
    size: Any = raw.get("block_size")
    mask: Any = options.get("mask_token_id")
    smallest = 1 if dspark else 2
    if not is_positive_integer(size) or size < smallest:
        raise ValueError(f"block_size must be an integer from {smallest}, got {shown(size)}")
    _check_fit(model, raw, target)
    if not is_integer(mask) or not 0 <= mask < target.vocab_size:
        raise ValueError(
            f"mask_token_id {shown(mask)} is no id of the target's {target.vocab_size} tokens"
        )
    return BlockConfig(
        model=model,
        capture=_captured(options.get("target_layer_ids"), target),
        block_size=size,
        mask_token=mask,
        predicts_next=dspark,
        markov_rank=rank,
        confidence=_confidence(raw) if dspark else None,
    )


def _nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    options = raw.get("dflash_config")
    if not isinstance(options, dict):
        raise ValueError(f"dflash_config must be an object, got {shown(options)}")
    check_keys(options, _OPTION_KEYS, _DFLASH_FIXED, "dflash_config")
    return options


def _layers(raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("model_type") != "qwen3":
        given = shown(raw.get("model_type"))
        raise ValueError(f"model_type {given} is not supported for a block drafter, only 'qwen3'")
    check_head_keys(raw)
    model = parse_model_config({**raw, "architectures": None, "tie_word_embeddings": False})
    if any(layer.attention.window for layer in model.layers):
        raise ValueError("sliding windows in the layers of a block drafter are not supported")
    return model


def _markov_rank(raw: Mapping[str, Any]) -> int:
    rank, kind = raw.get("markov_rank", 0), raw.get("markov_head_type")
    if not is_integer(rank) or rank < 0:
        raise ValueError(f"markov_rank must be an integer from 0, got {shown(rank)}")
    if rank and kind != "vanilla":
        raise ValueError(f"markov_head_type {shown(kind)} is not supported, only 'vanilla'")
    return rank


def _confidence(raw: Mapping[str, Any]) -> Literal["output", "output and token"] | None:
    names = "enable_confidence_head", "confidence_head_with_markov"
    enabled, with_markov = (raw.get(name, False) for name in names)
    for name, value in zip(names, (enabled, with_markov), strict=True):
        check_flag(name, value)
    if not enabled:
        return None
    return "output and token" if with_markov else "output"


def _check_fit(model: ModelConfig, raw: Mapping[str, Any], target: ModelConfig) -> None:
    checks = (
        ("vocab_size", model.vocab_size, target.vocab_size),
        ("hidden_size", model.hidden_size, target.hidden_size),
        ("num_target_layers", raw.get("num_target_layers"), target.num_layers),
    )
    for name, value, expected in checks:
        if value is not None and value != expected:
            raise ValueError(
                f"the block drafter does not fit the target: its {name} is {shown(value)}, not "
                f"{expected}"
            )
    if target.embed_scale != 1 or target.logit_divisor != 1 or target.logit_softcap is not None:
        raise ValueError(
            "block drafters need a target whose embeddings and logits are not scaled or capped"
        )


def _captured(ids: Any, target: ModelConfig) -> tuple[int, ...]:
    """Hidden states that the head reads. A config has the index of the layer whose output is read,
    -1 for the embeddings; ids of ``capture`` count layers.

    The last layer's output is refused: it is normed in some engines, and not in others.
    """
    largest = target.num_layers - 2
    good = isinstance(ids, list) and len(ids) > 0 and all(map(is_integer, ids))
    if not good or sorted(set(ids)) != ids or ids[0] < -1 or ids[-1] > largest:
        raise ValueError(
            f"target_layer_ids must be increasing layers from -1 to {largest}, got {shown(ids)}"
        )
    return tuple(index + 1 for index in ids)


def to_hf_block(head: BlockHead, target: ModelConfig) -> dict[str, Any]:
    """A ``config.json`` that describes a head, in the layout that it was published in."""
    options = {
        "target_layer_ids": [index - 1 for index in head.capture],
        "mask_token_id": head.mask_token,
    }
    config = to_hf_config(head.config) | {
        "torch_dtype": jnp.dtype(head.dtype).name,
        "block_size": head.block_size,
        "num_target_layers": target.num_layers,
    }
    if not head.predicts_next:
        return config | {"architectures": [DFLASH], "dflash_config": options}
    markov, confidence = head.markov, head.confidence
    rank = 0 if markov is None else markov.before.shape[1]
    dspark: dict[str, Any] = {"num_anchors": 0, "markov_rank": rank}
    if rank:
        dspark["markov_head_type"] = "vanilla"
    dspark["enable_confidence_head"] = confidence is not None
    if confidence is not None:
        reads_token = confidence.weight.shape[1] > head.config.hidden_size
        dspark["confidence_head_with_markov"] = reads_token
    return config | {"architectures": [DSPARK]} | options | dspark
