"""The rope parameters of YaRN."""

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.config.yarn import YarnRopeScaling
from jaxspec.models.hf_values import check_flag


def yarn_scaling(parameters: Mapping[str, Any]) -> YarnRopeScaling:
    """The scaling of rope parameters, whose numbers were checked.

    Raises ValueError for a ``truncate`` that is no flag.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    truncate = given.get("truncate", True)
    check_flag("rope parameter truncate", truncate)
    return YarnRopeScaling(
        factor=float(given["factor"]),
        original_max_position=int(given["original_max_position_embeddings"]),
        attention_factor=_attention_factor(given),
        beta_fast=float(given.get("beta_fast", 32.0)),
        beta_slow=float(given.get("beta_slow", 1.0)),
        truncate=truncate,
    )


def written_yarn(scaling: YarnRopeScaling) -> dict[str, Any]:
    """The parameters of a scaling."""
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "attention_factor": scaling.attention_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }


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
