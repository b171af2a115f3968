"""The keys of a block head's ``config.json`` that say how its logits are corrected, and its
confidence head: read and written in DeepSpec's words."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.models.heads import BlockHead, MarkovConfig
from jaxspec.models.heads.corrections import MARKOV_KINDS, CorrectionConfig
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import check_flag, is_integer, shown

CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
DSPARK_KEYS = words("markov_rank markov_head_type") | {*CONFIDENCE}


def correction_config(options: Mapping[str, Any]) -> CorrectionConfig | None:
    """The correction that a head has; None: none. Raises ValueError for one that is not
    supported."""
    rank, kind = options.get("markov_rank", 0), options.get("markov_head_type")
    if not is_integer(rank) or rank < 0:
        raise ValueError(f"markov_rank must be an integer from 0, got {shown(rank)}")
    if not rank:
        return None
    for supported in MARKOV_KINDS:
        if kind == supported:
            return MarkovConfig(rank, supported)
    kinds = ", ".join(map(repr, MARKOV_KINDS))
    raise ValueError(f"markov_head_type {shown(kind)} is not supported, only {kinds}")


def confidence_config(
    options: Mapping[str, Any],
) -> Literal["output", "output and token"] | None:
    """What a head's confidence head reads; None: it has none."""
    enabled, with_markov = (check_flag(name, options.get(name, False)) for name in CONFIDENCE)
    if not enabled:
        return None
    return "output and token" if with_markov else "output"


def dspark_options(head: BlockHead) -> dict[str, Any]:
    """The keys of a DSpark head, as DeepSpec writes them."""
    markov, confidence = head.markov, head.confidence
    options: dict[str, Any] = {"markov_rank": 0}
    if markov is not None:
        options = {"markov_rank": markov.config.rank, "markov_head_type": markov.config.kind}
    options["enable_confidence_head"] = confidence is not None
    if confidence is not None:
        reads_token = confidence.weight.shape[1] > head.config.hidden_size
        options["confidence_head_with_markov"] = reads_token
    return options
