"""Configs of MLPs: the part of a layer that works on each token separately."""

import dataclasses
from typing import Literal

from jaxspec.config.checks import check_positive
from jaxspec.config.experts import ExpertsConfig, LimitedSwiglu

Activation = Literal["silu", "gelu_tanh"] | LimitedSwiglu


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A gated MLP: down(activation(gate(x)) * up(x)), or what LimitedSwiglu makes of the two.

    ``fused``: checkpoints have gate and up in one tensor, ``gate_up_proj``. ``gate_multiplier`` and
    ``down_multiplier``: these projections are multiplied when they are read.
    """

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    fused: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    def __post_init__(self):
        check_positive(intermediate_size=self.intermediate_size)
        check_positive(gate_multiplier=self.gate_multiplier, down_multiplier=self.down_multiplier)


@dataclasses.dataclass(frozen=True)
class XieluConfig:
    """An MLP without a gate: down(xIELU(up(x))), whose activation has numbers that are learnt."""

    intermediate_size: int

    def __post_init__(self):
        check_positive(intermediate_size=self.intermediate_size)


MlpConfig = DenseConfig | ExpertsConfig | XieluConfig


def dense_like(mlp: MlpConfig) -> DenseConfig:
    """Without biases, and with as many hidden units as a token goes through: for draft heads."""
    size = mlp.active_size if isinstance(mlp, ExpertsConfig) else mlp.intermediate_size
    return DenseConfig(size)
