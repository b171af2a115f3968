"""Which tokens the layers of a block head see: windows, and whether blocks are causal.

Trainers agree on the keys, and differ in what an absent one means. ``layer_types`` with sliding
layers: those are causal inside of a block and the others are not (z-lab, SpecForge, speculators).
``use_swa`` (ModelOpt, MiMo): every layer has the window, and none is causal. A file that says
whether it is causal means all of its layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.windows import FULL, optional_windows
from jaxspec.models.heads import BlockHead
from jaxspec.models.heads.block_context import Causality
from jaxspec.models.json.values import check_flag, is_positive_integer, shown

# What publishers call a flag that all layers follow: at the top level, and in dflash_config.
CAUSAL_FLAGS = ("is_causal", "causal", "causal_head")


def with_windows(
    model: ModelConfig, layers: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[ModelConfig, Causality]:
    """The layers with their windows, and which of them are causal inside of a block.

    Raises ValueError for windows that are none, and for flags that contradict each other.
    """
    by_kind, everywhere = _by_kind(layers, model.num_layers), _everywhere(options)
    if everywhere and any(by_kind) and {*by_kind} - {None} != {everywhere}:
        raise ValueError(
            f"sliding_window is {max(filter(None, by_kind))}, and swa_window_size {everywhere}; "
            "remove the one that is wrong"
        )
    windows = [everywhere] * model.num_layers if everywhere and not any(by_kind) else by_kind
    said = _said_causal(options)
    if said is None:
        causal = "windows" if any(by_kind) else "none"
    else:
        causal = "all" if said else "none"
    pairs = zip(model.layers, windows, strict=True)
    return dataclasses.replace(model, layers=tuple(_with_window(*pair) for pair in pairs)), causal


def _by_kind(layers: Mapping[str, Any], count: int) -> tuple[int | None, ...]:
    """Windows by ``layer_types``, or else as Qwen3's configs say them."""
    kinds, used = layers.get("layer_types"), layers.get("use_sliding_window")
    most = layers.get("max_window_layers")
    return optional_windows(
        {
            "num_hidden_layers": count,
            "layer_types": kinds,
            "sliding_window": layers.get("sliding_window"),
            "use_sliding_window": kinds is not None and kinds != [FULL] * count
            if used is None
            else check_flag("use_sliding_window", used),
            "max_window_layers": 28 if most is None else most,
        }
    )


def _everywhere(options: Mapping[str, Any]) -> int | None:
    """The window of ``use_swa``, which every layer has."""
    used, window = options.get("use_swa"), options.get("swa_window_size")
    if used is None and window is not None:
        raise ValueError(
            f"swa_window_size is {shown(window)}, and use_swa is not given: add it, true or false"
        )
    if used is None or not check_flag("use_swa", used):
        return None
    if not is_positive_integer(window):
        raise ValueError(f"swa_window_size must be a positive integer, got {shown(window)}")
    return window


def _said_causal(options: Mapping[str, Any]) -> bool | None:
    """What a file says of all layers; None: nothing."""
    flags = {name: options[name] for name in CAUSAL_FLAGS if options.get(name) is not None}
    values = {check_flag(name, value) for name, value in flags.items()}
    if len(values) > 1:
        given = " and ".join(f"{name} = {value}" for name, value in flags.items())
        raise ValueError(f"{given} contradict each other; remove the one that is wrong")
    return values.pop() if values else None


def said_causal(head: BlockHead) -> bool | None:
    """``is_causal`` of a head's ``config.json``; None: its ``layer_types`` say it."""
    has_windows = any(layer.attention.window for layer in head.config.layers)
    if head.causal == ("windows" if has_windows else "none"):
        return None
    return head.causal == "all"


def _with_window(layer: LayerConfig, window: int | None) -> LayerConfig:
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, window=window))
