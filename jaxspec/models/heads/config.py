"""Configuration of draft heads."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxspec.config.model import LayerConfig, ModelConfig, draft_layers
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.json.mtp_names import MtpNames

EagleMethod = Literal["eagle3", "eagle1"]
BLOCK_STATES = 5  # hidden states that published block heads read
HeadMethod = EagleMethod | Literal["mtp"]


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Configuration of a draft head.

    Attributes:
      model: its layers; ``vocab_size`` is the target's.
      method: the kind of its front.
      capture: the target's hidden states that it reads (see decoder.run).
      draft_vocab_size: size of a reduced draft vocabulary; None: the target's vocabulary.
      has_embeddings: it has its own embeddings instead of the target's.
      has_lm_head: an EAGLE-3 head or an MTP layer has its own LM head instead of the target's.
      mask_token: of an EAGLE-3 head that drafts several tokens at once; see MaskEntry.
      fc_bias, fc_norm, norm_before_fc, norm_before_residual: see Eagle3Front.
      norm_output: see DraftHead.recycle_normed.
      mtp: names of an MTP layer's tensors.
    """

    model: ModelConfig
    method: HeadMethod
    capture: tuple[int, ...]
    draft_vocab_size: int | None = None
    has_embeddings: bool = False
    has_lm_head: bool = True
    mask_token: int | None = None
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    mtp: MtpNames | None = None


def default_capture(method: EagleMethod, target_layers: int) -> tuple[int, ...]:
    """The target's hidden states that a head reads unless its config names others.

    EAGLE-3 reads three, in the order of the layers. Models too small for the usual choice use the
    middle and its neighbors; one of a single layer has no three, and check_capture refuses them.
    """
    if method == "eagle1":
        return (FINAL_NORM,)
    early, middle, late = 2, target_layers // 2, target_layers - 3
    if not early < middle < late:
        early, late = max(middle - 1, 0), middle + 1
    return early, middle, late


def block_layers(target: ModelConfig, count: int, width: int | None = None) -> ModelConfig:
    """Qwen3's layers with the target's sizes; ``width``: see draft_layers."""

    def normed(layer: LayerConfig) -> LayerConfig:
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, qk_norm=True))

    layers = draft_layers(target, count, width).map_layers(normed)
    return dataclasses.replace(layers, stop_token_ids=())


def default_block_capture(target_layers: int) -> tuple[int, ...]:
    """The layers whose hidden states a block head reads: as many as published heads read, from
    early to late at equal distances; fewer of a small target. Never
    the last one, whose norm engines disagree about."""
    first = min(2, target_layers - 1)
    last = max(first, target_layers - 2)
    spread = (first + round(i * (last - first) / (BLOCK_STATES - 1)) for i in range(BLOCK_STATES))
    return tuple(sorted(set(spread)))


def check_capture(ids: Sequence[int], target_layers: int) -> tuple[int, ...]:
    """``ids`` in order. Raises ValueError unless they are distinct layers of the target."""
    if not ids or len(set(ids)) != len(ids) or not set(ids) <= set(range(target_layers + 1)):
        raise ValueError(
            f"a head cannot read layers {list(ids)}: they must be distinct, of 0 to {target_layers}"
        )
    return tuple(sorted(ids))
