"""Rope parameters of a ``config.json``.

Two kinds depend on the length of the sequence. A cache holds keys that are rotated already, so
their rotation cannot change once a sequence has become longer:

- ``dynamic`` is plain up to max_position_embeddings, which is the longest sequence here.
- ``longrope`` has factors for sequences up to the original length, and others for longer ones. The
  first are used, and longer sequences are not possible. With equal lists they are.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.config.checks import Problems
from jaxspec.config.rope import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    QueryScaling,
    RopeConfig,
    RopeScaling,
    YarnRopeScaling,
)
from jaxspec.models.families.family import Keys, check_keys, head_dim
from jaxspec.models.json import keys as hf_keys
from jaxspec.models.json.values import (
    check_flag,
    is_positive_number,
    shown,
)

PARTIAL, ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"
BETA, POSITIONS = "llama_4_scaling_beta", "max_position_embeddings"
PARAMETERS = ("rope_parameters", "rope_scaling")
# Parameters of positions in images.
OF_IMAGES = hf_keys.words("mrope_section mrope_interleaved")
# For each rope_type: the parameters it must have, and those that it may have.
NEEDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": hf_keys.words("rope_theta"),
        "linear": hf_keys.words("rope_theta factor"),
        "dynamic": hf_keys.words("rope_theta factor"),
        "llama3": hf_keys.words(f"rope_theta factor low_freq_factor high_freq_factor {ORIGINAL}"),
        "yarn": hf_keys.words(f"rope_theta factor {ORIGINAL}"),
        "proportional": hf_keys.words("rope_theta"),
        "longrope": hf_keys.words(f"rope_theta factor short_factor long_factor {ORIGINAL}"),
    }
)
MAY_HAVE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "yarn": hf_keys.words(
            "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
        ),
        "longrope": hf_keys.words("attention_factor"),
    }
)
_WRITTEN = MappingProxyType(
    {Llama3RopeScaling: "llama3", LinearRopeScaling: "linear", YarnRopeScaling: "yarn"}
)
LISTS, FLAGS = hf_keys.words("short_factor long_factor"), hf_keys.words("truncate")


def rope_of(hf: Keys) -> RopeConfig:
    """The rope of all layers. A family that reads partial_rotary_factor has a default for it.

    Raises ValueError for parameters that are missing, unknown or of a wrong type.
    """
    shared = {key: hf[key] for key in (PARTIAL,) if key in hf}
    return rope_from(hf, hf["rope_scaling"] or hf["rope_parameters"], hf["rope_theta"], shared)


def rope_from(hf: Keys, given: Any, theta: float, shared: Keys | None = None) -> RopeConfig:
    """The rope of parameters ``given`` as in transformers 5 (``rope_parameters``); None: plain.

    Args:
      theta: if they do not have ``rope_theta``.
      shared: further parameters that they may lack.

    Raises ValueError as rope_of does.
    """
    parameters = _parameters(hf, {} if given is None else given, theta, shared or {})
    _check(parameters, partial=PARTIAL in hf, scales_queries=BETA in hf)
    width = head_dim(hf)
    return RopeConfig(
        width,
        float(parameters["rope_theta"]),
        _scaling(parameters, width),
        rotary_dim(parameters, width),
        _query_scaling(parameters),
    )


def without_image_positions(raw: Keys) -> Keys:
    """The same without what rotates by three positions, of time, height and width (``mrope``). In a
    text they are equal, so it is plain rotation."""

    def rest(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kinds = {key: "default" for key in ("rope_type", "type") if given.get(key) == "mrope"}
        others = {key: value for key, value in given.items() if key not in OF_IMAGES}
        return others | kinds

    return {**raw, **{key: rest(raw[key]) for key in PARAMETERS if key in raw}}


# Of a family that multiplies queries by a factor of their position: it reads BETA among the rope
# parameters, and nowhere else.
SCALES_QUERIES: Mapping[str, Any] = MappingProxyType({BETA: None})
BETA_INSIDE: hf_keys.Allowed = MappingProxyType({BETA: (None,)})


def with_scaled_queries(raw: Keys, *, factor: float, original: int, theta: float) -> Keys:
    """The keys of a model that multiplies queries by a factor of their position, with what
    transformers takes for its rope parameters where the file has none: yarn, and BETA."""
    given = {key: raw[key] for key in PARAMETERS if isinstance(raw.get(key), dict)}
    default = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        ORIGINAL: original,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        BETA: 0.1,
    }
    return {**raw, **(given or {PARAMETERS[0]: default})}


def without_rope(rope: RopeConfig) -> RopeConfig:
    """The rope of layers that rotate nothing, in a model whose other layers have this rope."""
    return dataclasses.replace(rope, scaling=None, rotary_dim=0)


def _parameters(hf: Keys, given: Any, theta: float, shared: Keys) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"rope parameters must be an object, got {shown(given)}")
    kind = given.get("rope_type", given.get("type", "default"))
    parameters = {"rope_theta": theta, **shared, **given, "rope_type": kind}
    if kind in ("llama3", "yarn", "longrope"):
        longest, original = hf["max_position_embeddings"], hf[ORIGINAL]
        if original is not None:
            parameters[ORIGINAL] = original
        parameters.setdefault(ORIGINAL, longest)
        if kind != "llama3" and parameters.get("factor") is None:
            original = parameters[ORIGINAL]
            parameters["factor"] = longest / original if is_positive_number(original) else 1.0
    return parameters


def _check(parameters: Keys, *, partial: bool, scales_queries: bool) -> None:
    kind = parameters["rope_type"]
    if not isinstance(kind, str) or kind not in NEEDS:
        known = ", ".join(NEEDS)
        raise ValueError(f"rope_type {shown(kind)} is not supported; supported are {known}")
    needed, optional = NEEDS[kind], MAY_HAVE.get(kind, frozenset())
    known = needed | optional | {"rope_type", "type"} | ({PARTIAL} if partial else set())
    if scales_queries and ORIGINAL in needed:
        known |= {BETA, POSITIONS}  # the latter has no effect in transformers either
    fixed = {} if partial else {PARTIAL: hf_keys.FIXED_VALUES[PARTIAL]}
    problems = Problems()
    with problems.caught():
        check_keys(parameters, known, fixed, f"rope parameters of {kind!r}")
    has = {key for key, value in parameters.items() if value is not None}
    if missing := needed - has:
        problems.add(f"rope parameters of type {kind!r} lack {', '.join(sorted(missing))}")
    for key in sorted((needed | optional) & has):
        with problems.caught():
            _check_value(key, parameters[key])
    if not problems and parameters.get(ORIGINAL, 1) % 1:
        problems.add(f"rope parameter {ORIGINAL} must be an integer")
    problems.raise_all()


def _check_value(key: str, value: Any) -> None:
    if key in FLAGS:
        check_flag(key, value)
    elif key in LISTS:
        if not isinstance(value, list) or not all(map(is_positive_number, value)):
            raise ValueError(f"rope parameter {key} must be a list of numbers, got {shown(value)}")
    elif not is_positive_number(value):
        raise ValueError(f"rope parameter {key} must be a number above 0, got {shown(value)}")


def _share(parameters: Keys) -> float:
    """The share of a head's entries that are rotated."""
    share = parameters.get(PARTIAL)
    if share is None:
        return 1
    if not is_positive_number(share) or share > 1:
        raise ValueError(f"{PARTIAL} must be above 0, at most 1, got {shown(share)}")
    return share


def rotary_dim(parameters: Keys, width: int) -> int | None:
    share = _share(parameters)
    if share == 1 or parameters["rope_type"] == "proportional":
        return None
    rotary = int(width * share)
    if rotary % 2:
        raise ValueError(
            f"{PARTIAL} {share} of a head_dim of {width} is {rotary}: it must be an even number"
        )
    return rotary


def _query_scaling(parameters: Keys) -> QueryScaling | None:
    beta = parameters.get(BETA)
    if beta is None or beta == 0:
        return None
    if not is_positive_number(beta):
        raise ValueError(f"rope parameter {BETA} must be a number from 0 on, got {shown(beta)}")
    return QueryScaling(float(beta), int(parameters[ORIGINAL]))


def _scaling(parameters: Keys, width: int) -> RopeScaling | None:
    match parameters["rope_type"]:
        case "proportional":
            return ProportionalRopeScaling(int(_share(parameters) * width // 2))
        case "linear":
            return LinearRopeScaling(float(parameters["factor"]))
        case "llama3":
            return Llama3RopeScaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_position=int(parameters[ORIGINAL]),
            )
        case "yarn":
            return _yarn(parameters)
        case "longrope":
            return _longrope(parameters)
    return None


def _yarn(parameters: Keys) -> YarnRopeScaling:
    factor, attention_factor = parameters["factor"], parameters.get("attention_factor")
    if attention_factor is None:
        first, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = _yarn_factor(factor)
        if first and all_dims:
            attention_factor = _yarn_factor(factor, first) / _yarn_factor(factor, all_dims)
    truncate = parameters.get("truncate")
    return YarnRopeScaling(
        factor=float(factor),
        original_max_position=int(parameters[ORIGINAL]),
        attention_factor=float(attention_factor),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=True if truncate is None else truncate,
    )


def score_factor(hf: Keys) -> float:
    """What DeepSeek's scores are multiplied by under a rope scaling (``mscale_all_dim``)."""
    given = hf["rope_scaling"] or hf["rope_parameters"] or {}
    kind, weight = given.get("rope_type", given.get("type")), given.get("mscale_all_dim")
    if kind in (None, "default") or not weight:
        return 1.0
    return _yarn_factor(given["factor"], weight) ** 2


def _yarn_factor(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(parameters: Keys) -> LongRopeScaling:
    factor, original = parameters["factor"], int(parameters[ORIGINAL])
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    short, long = (tuple(map(float, parameters[key])) for key in ("short_factor", "long_factor"))
    return LongRopeScaling(short, float(attention_factor), None if short == long else original)


def written_rope(rope: RopeConfig) -> dict[str, Any]:
    """The keys of a rope, as every transformers version reads them.

    Raises ValueError for a kind that is not written.
    """
    if isinstance(rope.scaling, LongRopeScaling | ProportionalRopeScaling):
        kind = "longrope" if isinstance(rope.scaling, LongRopeScaling) else "proportional rope"
        raise ValueError(f"no config.json is written for models with {kind}")
    parameters: dict[str, Any] | None = None
    if rope.scaling is not None:
        parameters = {"rope_type": _WRITTEN[type(rope.scaling)], **dataclasses.asdict(rope.scaling)}
        if "original_max_position" in parameters:
            parameters[ORIGINAL] = parameters.pop("original_max_position")
    return {"rope_theta": rope.theta, "rope_scaling": parameters}
