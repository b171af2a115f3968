"""Sliding windows of layers, from the keys of a ``config.json``."""

from jaxspec.models.families.family import Keys
from jaxspec.models.json.values import is_integer, is_positive_integer, shown

FULL, SLIDING = "full_attention", "sliding_attention"


def window_of(hf: Keys) -> int | None:
    """The window in use: ``sliding_window``, unless ``use_sliding_window`` says that it is not.

    Raises ValueError for what is no window.
    """
    value = hf["sliding_window"] if hf.get("use_sliding_window", True) else None
    if value is not None and not is_positive_integer(value):
        raise ValueError(f"sliding_window must be a positive integer, got {shown(value)}")
    return value


def windows_by_kind(hf: Keys, default: list[str]) -> tuple[int | None, ...]:
    """A window or None for each layer, by ``layer_types``, or else by the kinds ``default``.

    Raises ValueError for kinds that are no list of as many layers, or unknown.
    """
    layers, window = hf["num_hidden_layers"], window_of(hf)
    kinds = default if hf["layer_types"] is None else hf["layer_types"]
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


def windows_of_most(hf: Keys, every: int) -> tuple[int | None, ...]:
    """Windows by ``layer_types``, or else in all layers but one of ``every``."""
    count = range(1, hf["num_hidden_layers"] + 1)
    return windows_by_kind(hf, [SLIDING if index % every else FULL for index in count])


def optional_windows(hf: Keys) -> tuple[int | None, ...]:
    """Windows where ``use_sliding_window`` says so, as in Qwen's configs: of the layers that
    ``layer_types`` names, or else of those from ``max_window_layers`` on."""
    layers = hf["num_hidden_layers"]
    first = layers if window_of(hf) is None else hf["max_window_layers"]
    if not is_integer(first):
        raise ValueError(f"max_window_layers must be an integer, got {shown(first)}")
    return windows_by_kind(hf, [SLIDING if i >= first else FULL for i in range(layers)])
