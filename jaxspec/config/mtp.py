"""Layers for multi-token prediction (MTP), which a checkpoint may have beside its model."""

import dataclasses
from typing import Any, Literal

from jaxspec.config.layer import LayerConfig

# How families name and join the parts of such a layer; see models/heads/mtp.py.
MtpLayout = Literal[
    "deepseek", "deepseek_v4", "ernie", "mimo", "minimax_m3", "nemotron", "qwen", "qwen4_exp"
]


@dataclasses.dataclass(frozen=True)
class MtpStates:
    """Which hidden states MTP layers read. Families and engines disagree about both. They decide
    how much is accepted, never the text.

    Attributes:
      target_normed: of the target, which the first draft step reads: the state after its final
        norm, or before it.
      draft_normed: of an MTP layer, which the next step reads: the state after the layer's final
        norm, or before it.
    """

    target_normed: bool
    draft_normed: bool

    @property
    def name(self) -> str:
        """``before`` and ``after``: of both. ``before-after``: the target's before its norm, the
        layer's own after its norm. ``after-before``: the reverse."""
        target, of_mtp = (
            "after" if is_normed else "before"
            for is_normed in (self.target_normed, self.draft_normed)
        )
        return target if target == of_mtp else f"{target}-{of_mtp}"

    @classmethod
    def named(cls, name: Any) -> "MtpStates":
        """Raise ValueError for what is no such name."""
        for states in ALL_MTP_STATES:
            if states.name == name:
                return states
        names = ", ".join(states.name for states in ALL_MTP_STATES)
        raise ValueError(f"the states that MTP layers read must be one of {names}, got {name!r}")


BEFORE = MtpStates(target_normed=False, draft_normed=False)
AFTER = MtpStates(target_normed=True, draft_normed=True)
BEFORE_AFTER = MtpStates(target_normed=False, draft_normed=True)
AFTER_BEFORE = MtpStates(target_normed=True, draft_normed=False)
ALL_MTP_STATES = (BEFORE, AFTER, BEFORE_AFTER, AFTER_BEFORE)


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """MTP layers of a checkpoint.

    Attributes:
      layout: how their tensors are named, and how their inputs are joined.
      num_layers: how many there are.
      states: the hidden states that they read.
      layers: the transformer layer of each. Where there is none, it is like the model's last layer
        that is not recurrent.
      own_heads: each may have an LM head of other values than the target's.
    """

    layout: MtpLayout
    num_layers: int
    states: MtpStates
    layers: tuple[LayerConfig, ...] = ()
    own_heads: bool = False
