"""Sliding windows of layers, from the keys of a ``config.json``."""

from typing import Any

from jaxspec.models.families.family import Keys
from jaxspec.models.json.values import is_integer, is_positive_integer, shown

FULL, SLIDING = "full_attention", "sliding_attention"


def window_of(value: Any) -> int | None:
    """A window, or None. Raises ValueError for anything else."""
    if value is not None and not is_positive_integer(value):
        raise ValueError(f"sliding_window must be a positive integer, got {shown(value)}")
    return value


def windows_by_kind(hf: Keys, window: int | None, kinds: Any) -> tuple[int | None, ...]:
    """A window or None for each layer, by ``layer_types``.

    Raises ValueError for kinds that are no list of as many layers, or unknown.
    """
    layers = hf["num_hidden_layers"]
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types must be a list, got {shown(kinds)}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ValueError(f"layer_types: {shown(kind)} is not supported")
    if SLIDING in kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def optional_windows(hf: Keys) -> tuple[int | None, ...]:
    """Windows where ``use_sliding_window`` says so, as in Qwen's configs: of the layers that
    ``layer_types`` names, or else of those from ``max_window_layers`` on."""
    layers = hf["num_hidden_layers"]
    window = window_of(hf["sliding_window"] if hf["use_sliding_window"] else None)
    first = layers if window is None else hf["max_window_layers"]
    if not is_integer(first):
        raise ValueError(f"max_window_layers must be an integer, got {shown(first)}")
    kinds = hf["layer_types"]
    if kinds is None:
        kinds = [SLIDING if i >= first else FULL for i in range(layers)]
    return windows_by_kind(hf, window, kinds)
