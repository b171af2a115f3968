"""How publishers spell the ``config.json`` of a block head, read into one form.

- z-lab's DFlash and DFlash 2 (``DFlashDraftModel``, ``DFlash2DraftModel``): options in
  ``dflash_config``.
- DeepSpec's DSpark (``Qwen3DSparkModel``): options at the top level.
- SpecForge's DSpark (``DSparkDraftModel``): options in ``dflash_config``.
- vLLM's speculators library: options at the top level, the layers in ``transformer_layer_config``.
- Those of block_spellings.py, which are made ones of these.

An unknown key is an error.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.checks import Problems
from jaxspec.models.families.family import check_keys
from jaxspec.models.from_config.block_bodies import BODY_KEYS, SINKS_BESIDE
from jaxspec.models.from_config.block_corrections import HEAD_KINDS, HeadKind, Kind
from jaxspec.models.from_config.block_spellings import (
    from_angelslim,
    from_modelopt,
    from_torchspec,
    is_dspark_of_modelopt,
    is_of_angelslim,
    is_of_torchspec,
)
from jaxspec.models.from_config.block_windows import CAUSAL_FLAGS
from jaxspec.models.json import keys as hf_keys
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import check_flag, shown

DFLASH, DSPARK, FORGE_DSPARK = "DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel"
DFLASH2, LILICORR, DOMINO = "DFlash2DraftModel", "LiLiCorrDraftModel", "DominoDraftModel"
XPRESS = "Qwen3XPressModel"
# Kinds of the architectures whose options are in ``dflash_config``.
_ARCHITECTURES: Mapping[str, Kind] = MappingProxyType(
    {
        DFLASH: "dflash",
        FORGE_DSPARK: "dspark",
        DFLASH2: "dflash2",
        LILICORR: "lilicorr",
        DOMINO: "domino",
        XPRESS: "xpress",
        "DFlashQwen3XPressModel": "xpress",
    }
)
SPECULATORS = "speculators_model_type"
SPECULATORS_KINDS = ("dflash", "dspark", "dflash2", "xpress")
_SPECULATORS_NAMES = frozenset(
    {DFLASH, DSPARK, FORGE_DSPARK, DFLASH2, "DFlashSpeculator", "DSparkSpeculator"}
    | {"XPressDraftModel", "XPressSpeculator"}
)
# Keys that the layers do not have. ``auto_map`` names code, ``num_anchors`` is for training.
_SHARED = words("block_size num_target_layers auto_map draft_vocab_size target_hidden_size")
_PLACE = words("block_size target_layer_ids mask_token_id")
# SpecForge's, of the training, and of the number of heads, which has a key of its own.
_FORGE_UNUSED = words("attention_mode confidence_head_alpha")
# See block_windows.py; and JetSpec's place of a key that others have at the top level.
_NESTED = words("causal causal_head use_swa swa_window_size target_hidden_size")
_SPECULATORS_UNUSED = words("max_anchors")  # of the training


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """What a block head's ``config.json`` says.

    Attributes:
      layers: config of its layers.
      options: ``block_size``, ``mask_token_id`` and what DSpark's heads have, in DeepSpec's words;
        what block_windows.py reads.
      captured: what the file calls the target's layers that the head reads.
      counts_from: how many layers have run where the head reads id 0.
      predicts_next: see BlockConfig.
      kind: what it has beside DFlash's (see HeadKind).
      scaled: it was trained with embeddings and logits that have the target's scales and caps.
    """

    layers: Mapping[str, Any]
    options: Mapping[str, Any]
    captured: str
    counts_from: int
    predicts_next: bool
    kind: Kind
    scaled: bool = False


def says_block(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a block head's, supported or not."""
    names = raw.get("architectures")
    named = shown(names) if isinstance(names, list | str) else ""
    kinds = ("DFlash", "DSpark", "XPress", "Domino", "LiLiCorr")
    of_speculators = raw.get(SPECULATORS) in SPECULATORS_KINDS
    return "dflash_config" in raw or of_speculators or any(kind in named for kind in kinds)


def block_layout(raw: Mapping[str, Any], problems: Problems) -> BlockLayout:
    """What a ``config.json`` says. Unknown keys, and what contradicts itself, become ``problems``.

    Raises ValueError for a layout that is not supported.
    """
    if SPECULATORS in raw:
        return _of_speculators(raw, problems)
    if is_of_angelslim(raw):
        raw = from_angelslim(raw)
    names = raw.get("architectures")
    if names == [DSPARK]:
        kind = HEAD_KINDS["dspark"]
        keys_beside = _SHARED | _PLACE | kind.keys | {"is_causal"}
        return BlockLayout(_without(raw, keys_beside), raw, "target_layer_ids", 1, True, kind.name)
    named = [kind for name, kind in _ARCHITECTURES.items() if names == [name]]
    if not named:
        raise ValueError(
            f"architectures {shown(names)} is not a supported block drafter, only {DSPARK}, "
            f"{', '.join(_ARCHITECTURES)}"
        )
    kind = HEAD_KINDS[named[0]]
    if is_of_torchspec(raw):
        return _with_options_nested(from_torchspec(raw), kind, problems, scaled=False)
    return _with_options_nested(raw, kind, problems)


def _with_options_nested(
    raw: Mapping[str, Any], kind: HeadKind, problems: Problems, scaled: bool = True
) -> BlockLayout:
    """z-lab's and SpecForge's layouts."""
    nested = raw.get("dflash_config")
    if not isinstance(nested, dict):
        raise ValueError(f"dflash_config must be an object, got {shown(nested)}")
    if is_dspark_of_modelopt(nested):
        nested, kind = from_modelopt(nested), HEAD_KINDS["dspark"]
    elif kind.name == "dflash":
        kind = HEAD_KINDS[_kind_of_options(nested)]
    is_dspark = kind.name == "dspark"
    known = _PLACE | _NESTED | BODY_KEYS | kind.keys
    known |= _FORGE_UNUSED if is_dspark else frozenset()
    with problems.caught():
        check_keys(nested, known, {"projector_type": (None, kind.name)}, "dflash_config")
    keys_beside = _SHARED | {"is_causal", SINKS_BESIDE} | (frozenset() if is_dspark else kind.keys)
    for key in {*keys_beside, "block_size"} & raw.keys() & nested.keys():
        if raw[key] != nested[key]:
            problems.add(
                f"{key} is {shown(nested[key])} inside dflash_config, and {shown(raw[key])} beside "
                "it; remove the one that is wrong"
            )
    options = {"block_size": None} | {key: raw[key] for key in keys_beside & raw.keys()} | nested
    top = _without(raw, keys_beside | {"dflash_config"})
    predicts_next, scaled = kind.predicts_next, scaled and kind.name in ("dflash", "dflash2")
    if kind.name == "domino":
        with problems.caught():
            predicts_next = check_flag("shift_label", options.get("shift_label", False))
    if kind.name == "lilicorr" and not any(options.get(name) is not None for name in CAUSAL_FLAGS):
        options["is_causal"] = False
    if kind.name == "xpress" and options["block_size"] is None:
        options["block_size"] = options.get("xpress_block_size")
    return BlockLayout(top, options, "target_layer_ids", 1, predicts_next, kind.name, scaled)


def _kind_of_options(nested: Mapping[str, Any]) -> Kind:
    """The kind of a head whose architecture is DFlash's. Raises ValueError for an unknown one."""
    named = nested.get("projector_type")
    for kind in (HEAD_KINDS["domino"], HEAD_KINDS["lilicorr"]):
        if named == kind.name:
            return kind.name
    if named not in (None, "dflash"):
        raise ValueError(
            f"dflash_config: projector_type {shown(named)} is not a supported block drafter, only "
            "dflash, domino, lilicorr, and dspark with use_confidence_head"
        )
    return "lilicorr" if nested.get("lilicorr_enabled") else "dflash"


def _of_speculators(raw: Mapping[str, Any], problems: Problems) -> BlockLayout:
    where = "a config of the speculators library"
    if raw[SPECULATORS] not in SPECULATORS_KINDS:
        raise ValueError(
            f"{SPECULATORS} {shown(raw[SPECULATORS])} is not a supported block drafter, only "
            f"{', '.join(SPECULATORS_KINDS)}"
        )
    kind = HEAD_KINDS[raw[SPECULATORS]]
    known = hf_keys.HARMLESS_KEYS | hf_keys.SPECULATORS_HARMLESS_KEYS | _SPECULATORS_UNUSED
    known |= _SHARED | words("architectures transformer_layer_config mask_token_id")
    known |= (
        {SPECULATORS}
        | words("aux_hidden_state_layer_ids sample_from_anchor sliding_window_non_causal")
        | kind.keys
    )
    with problems.caught():
        check_keys(raw, known, {"tie_word_embeddings": (None, False)}, where)
    names, layers = raw.get("architectures") or [], raw.get("transformer_layer_config")
    if not isinstance(names, list) or not _SPECULATORS_NAMES.issuperset(map(str, names)):
        raise ValueError(f"architectures {shown(names)} is not a supported block drafter")
    if not isinstance(layers, dict):
        raise ValueError(
            f"{where}: transformer_layer_config must be an object, got {shown(layers)}"
        )
    if layers.get("model_type") in hf_keys.SPECULATORS_MODEL_TYPES:  # the layers are Qwen3's
        layers = layers | {"model_type": "qwen3"}
    given = {key: value for key, value in raw.items() if value is not None}
    options = {"block_size": 8} | kind.defaults_beside(given) | given
    predicts_next, both_ways = kind.predicts_next, "sliding_window_non_causal"
    with problems.caught():
        predicts_next = check_flag(
            "sample_from_anchor", options.get("sample_from_anchor", predicts_next)
        )
    with problems.caught():
        if check_flag(both_ways, options.get(both_ways, kind.both_ways)):
            options["is_causal"] = False
    return BlockLayout(layers, options, "aux_hidden_state_layer_ids", 0, predicts_next, kind.name)


def _without(raw: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}
