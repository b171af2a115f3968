"""Layers for multi-token prediction (MTP), which a checkpoint may have beside its model."""

import dataclasses
from typing import Literal

# How families name and join the parts of such a layer; see models/heads/mtp.py.
MtpLayout = Literal["deepseek", "mimo", "qwen"]


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """MTP layers of a checkpoint.

    Attributes:
      layout: how their tensors are named, and how their inputs are joined.
      num_layers: how many there are. Each is like the model's last layer that
        is not recurrent.
      normed: the hidden states that they read, of the model and their own, are those after a norm.
        Families and engines disagree about this. It decides how much is accepted, never the text.
    """

    layout: MtpLayout
    num_layers: int
    normed: bool
