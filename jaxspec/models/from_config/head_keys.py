"""Keys of a draft head's ``config.json`` that are not the head's alone."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.families import FAMILIES
from jaxspec.models.families.family import check_keys
from jaxspec.models.json import keys as hf_keys
from jaxspec.models.json.declared import declared_keys


def layer_keys(raw: Mapping[str, Any], more: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What a head's layers have, and ``more``. Positions are those of a text. Other keys are left
    out: they were copied from the target."""
    kept = {key: raw[key] for key in raw.keys() & (hf_keys.HEAD_LAYER_KEYS | more)}
    for key in kept.keys() & {"rope_scaling", "rope_parameters"}:
        kept[key] = _of_text(kept[key])
    return kept


def _of_text(rope: Any) -> Any:
    """Rope parameters without what is of images."""
    if not isinstance(rope, dict):
        return rope
    kept = {key: value for key, value in rope.items() if key not in hf_keys.IMAGE_ROPE_KEYS}
    kinds = {key: "default" for key in ("type", "rope_type") if kept.get(key) == "mrope"}
    return kept | kinds


def check_head_keys(raw: Mapping[str, Any]) -> None:
    """Check the keys that remain when those which only heads have are taken away.

    Keys of a model, of any family, are fine: they were copied from the target. Raises ValueError
    for others: such a key may be of a head that computes something else.
    """
    of_models = {key for kind in FAMILIES for key in declared_keys(kind) or ()}
    rest = {key: value for key, value in raw.items() if not hf_keys.is_bookkeeping(key)}
    known = hf_keys.COMMON_KEYS | hf_keys.FIXED_VALUES.keys() | of_models
    check_keys(rest, frozenset(known), {})
