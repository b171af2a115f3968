"""Rope parameters of a ``config.json``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.rope import Llama3RopeScaling, RopeConfig
from jaxspec.config.yarn import YarnRopeScaling
from jaxspec.models import hf_keys
from jaxspec.models.families.family import Keys, check_keys, head_dim
from jaxspec.models.families.yarn import written_yarn, yarn_scaling
from jaxspec.models.hf_values import is_positive_number, shown

PARTIAL = "partial_rotary_factor"
# For each rope_type: the parameters it must have.
NEEDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": hf_keys.words("rope_theta"),
        "llama3": hf_keys.words(
            """rope_theta factor low_freq_factor high_freq_factor
            original_max_position_embeddings"""
        ),
        "yarn": hf_keys.words("rope_theta factor original_max_position_embeddings"),
    }
)
KINDS = ", ".join(map(repr, NEEDS))
TRUNCATE = "truncate"
# The parameters that it may have.
OPTIONAL: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "yarn": hf_keys.words("beta_fast beta_slow attention_factor mscale mscale_all_dim")
        | {TRUNCATE}
    }
)


def rope_of(hf: Keys) -> RopeConfig:
    """The rope of all layers. A family that reads partial_rotary_factor has a default for it.

    Raises ValueError for parameters that are missing, unknown or of a wrong type.
    """
    parameters = _parameters(hf)
    _check(parameters, partial=PARTIAL in hf)
    width, theta = head_dim(hf), float(parameters["rope_theta"])
    return RopeConfig(width, theta, _scaling(parameters), _rotary_dim(parameters, width))


def _parameters(hf: Keys) -> dict[str, Any]:
    """Rope parameters as in transformers 5 (``rope_parameters``), from keys of either version."""
    given = hf["rope_scaling"] or hf["rope_parameters"] or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope parameters must be an object, got {shown(given)}")
    kind = given.get("rope_type", given.get("type", "default"))
    parameters = {key: hf[key] for key in ("rope_theta", PARTIAL) if key in hf}
    parameters |= given | {"rope_type": kind}
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    return parameters


def _check(parameters: Keys, *, partial: bool) -> None:
    kind = parameters["rope_type"]
    if not isinstance(kind, str) or kind not in NEEDS:
        raise ValueError(f"rope_type {shown(kind)} is not supported; supported are {KINDS}")
    needed, optional = NEEDS[kind], OPTIONAL.get(kind, frozenset())
    known = needed | optional | {"rope_type", "type"} | ({PARTIAL} if partial else set())
    fixed = {} if partial else {PARTIAL: hf_keys.FIXED_VALUES[PARTIAL]}
    check_keys(parameters, known, fixed, f"rope parameters of {kind!r}")
    missing = needed - {key for key, value in parameters.items() if value is not None}
    if missing:
        raise ValueError(f"rope parameters of type {kind!r} lack {', '.join(sorted(missing))}")
    numbers = needed | {key for key in optional if parameters.get(key) is not None}
    for key in sorted(numbers - {TRUNCATE}):
        if not is_positive_number(parameters[key]):
            given = shown(parameters[key])
            raise ValueError(f"rope parameter {key} must be a number above 0, got {given}")
    if parameters.get("original_max_position_embeddings", 1) % 1:
        raise ValueError("rope parameter original_max_position_embeddings must be an integer")


def _rotary_dim(parameters: Keys, width: int) -> int | None:
    share = parameters.get(PARTIAL)
    if share is None or share == 1:
        return None
    if not is_positive_number(share) or share > 1:
        raise ValueError(f"{PARTIAL} must be above 0, at most 1, got {shown(share)}")
    return int(width * share)


def _scaling(parameters: Keys) -> Llama3RopeScaling | YarnRopeScaling | None:
    if parameters["rope_type"] == "default":
        return None
    if parameters["rope_type"] == "yarn":
        return yarn_scaling(parameters)
    return Llama3RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
    )


def written_rope(rope: RopeConfig) -> dict[str, Any]:
    """The keys of a rope, as every transformers version reads them."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    if isinstance(scaling, YarnRopeScaling):
        return {"rope_theta": rope.theta, "rope_scaling": written_yarn(scaling)}
    parameters = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    return {"rope_theta": rope.theta, "rope_scaling": parameters}
