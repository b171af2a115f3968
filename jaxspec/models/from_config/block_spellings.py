"""Layouts of block heads that are z-lab's or SpecForge's in other words, in these words.

TorchSpec has all keys at the top level, and no ``block_size``: its trainer's default stands for it.
ModelOpt's DSpark has an architecture that does not say so. AngelSlim's DFlash is z-lab's by another
name, with keys of the training.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.json.keys import words
from jaxspec.models.json.values import is_positive_integer, shown

TORCHSPEC_BLOCK = 16  # tokens of a block that its trainer takes unless it is told otherwise
_TORCHSPEC_OWN = words("target_num_hidden_layers target_layer_ids mask_token_id block_size")
_ANGELSLIM_UNUSED = words("num_anchors loss_decay_gamma attention_backend")


def is_of_angelslim(raw: Mapping[str, Any]) -> bool:
    return raw.get("architectures") == ["QwenDFlashDraftModel"]


def from_angelslim(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A DFlash head's file in z-lab's words."""
    rest = {key: value for key, value in raw.items() if key not in _ANGELSLIM_UNUSED}
    return rest | {"architectures": ["DFlashDraftModel"]}


def is_of_torchspec(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == "dflash" and "dflash_config" not in raw


def from_torchspec(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A DFlash head's file in z-lab's words. Raises ValueError for sizes that do not agree."""
    ids, count = raw.get("target_layer_ids"), raw.get("num_target_layers")
    heads: Any = raw.get("num_attention_heads")
    if isinstance(ids, list) and count not in (None, len(ids)):
        raise ValueError(
            f"num_target_layers is {shown(count)}, but target_layer_ids names {len(ids)} layers"
        )
    size = raw.get("block_size")
    hidden: Any = raw.get("hidden_size")
    rest = {key: value for key, value in raw.items() if key not in _TORCHSPEC_OWN}
    if "head_dim" not in raw and is_positive_integer(hidden) and is_positive_integer(heads):
        rest["head_dim"] = hidden // heads
    return rest | {
        "model_type": "qwen3",
        "block_size": TORCHSPEC_BLOCK if size is None else size,
        "num_target_layers": raw.get("target_num_hidden_layers"),
        "dflash_config": {
            "mask_token_id": raw.get("mask_token_id"),
            "target_layer_ids": ids,
        },
    }


def is_dspark_of_modelopt(nested: Mapping[str, Any]) -> bool:
    return nested.get("projector_type") == "dspark" and "use_confidence_head" in nested


def from_modelopt(nested: Mapping[str, Any]) -> dict[str, Any]:
    """``dflash_config`` of a DSpark head in SpecForge's words: outputs predict the next token."""
    if nested.get("shift_label") not in (None, True):
        given = shown(nested["shift_label"])
        raise ValueError(f"shift_label = {given} is not supported for a DSpark head, only True")
    renamed = words("shift_label use_confidence_head")
    has_confidence = nested["use_confidence_head"]
    return {key: value for key, value in nested.items() if key not in renamed} | {
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence,
    }
