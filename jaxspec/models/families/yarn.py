"""Reads the rope parameters of YaRN."""

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.config.yarn import YarnRopeScaling
from jaxspec.models.hf_keys import words
from jaxspec.models.hf_values import check_flag, is_positive_number, shown

NEEDED = words("rope_theta factor original_max_position_embeddings")
NUMBERS = NEEDED | words("beta_fast beta_slow attention_factor mscale mscale_all_dim")
KEYS = NUMBERS | words("rope_type type truncate")


def yarn_scaling(parameters: Mapping[str, Any]) -> YarnRopeScaling:
    """The scaling of a ``rope_parameters`` object with the keys KEYS.

    Raises ValueError for parameters that are missing or no positive numbers.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    if missing := NEEDED - given.keys():
        raise ValueError(f"rope parameters of type 'yarn' lack {', '.join(sorted(missing))}")
    for key in sorted(NUMBERS & given.keys()):
        if not is_positive_number(given[key]):
            raise ValueError(
                f"rope parameter {key} must be a number above 0, got {shown(given[key])}"
            )
    check_flag("rope parameter truncate", given.get("truncate", True))
    original = given["original_max_position_embeddings"]
    if original % 1:
        raise ValueError("rope parameter original_max_position_embeddings must be an integer")
    return YarnRopeScaling(
        factor=float(given["factor"]),
        original_max_position=int(original),
        attention_factor=_attention_factor(given),
        beta_fast=float(given.get("beta_fast", 32.0)),
        beta_slow=float(given.get("beta_slow", 1.0)),
        truncate=given.get("truncate", True),
    )


def _attention_factor(given: Mapping[str, Any]) -> float:
    """As given, or 0.1 ln(factor) + 1, or the quotient of two such sums weighted by ``mscale`` and
    ``mscale_all_dim`` (DeepSeek)."""
    if "attention_factor" in given:
        return float(given["attention_factor"])

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0

    if "mscale" in given and "mscale_all_dim" in given:
        return of(given["mscale"]) / of(given["mscale_all_dim"])
    return of(1.0)
