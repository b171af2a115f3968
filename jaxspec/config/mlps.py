"""Configs of MLPs: the part of a layer that works on each token separately."""

import dataclasses
from typing import Literal

from jaxspec.config.checks import check_positive
from jaxspec.config.experts import (
    BoundedSwiglu,
    ClampedSwiglu,
    ExpertsConfig,
    LimitedSwiglu,
    SquaredRelu,
)

Activation = (
    Literal["silu", "gelu_tanh"] | ClampedSwiglu | LimitedSwiglu | BoundedSwiglu | SquaredRelu
)


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A gated MLP: down(activation(gate(x)) * up(x)), or what ClampedSwiglu, LimitedSwiglu or
    BoundedSwiglu make of the two. With SquaredRelu there is no gate.

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
        if isinstance(self.activation, SquaredRelu) and (self.fused or self.gate_multiplier != 1):
            raise ValueError("an MLP with SquaredRelu has no gate")


@dataclasses.dataclass(frozen=True)
class XieluConfig:
    """An MLP without a gate: down(xIELU(up(x))), whose activation has numbers that are learnt."""

    intermediate_size: int

    def __post_init__(self):
        check_positive(intermediate_size=self.intermediate_size)


@dataclasses.dataclass(frozen=True)
class DenseAndExpertsConfig:
    """A gated MLP and experts that read the residual stream side by side, each by its norm; what
    they give is normed, too, and added (Gemma 4). Checkpoints have the gated MLP in ``mlp``."""

    dense: DenseConfig
    experts: ExpertsConfig

    @property
    def intermediate_size(self) -> int:
        """Hidden units of the gated MLP."""
        return self.dense.intermediate_size

    @property
    def active_size(self) -> int:
        """Hidden units that a token goes through."""
        return self.dense.intermediate_size + self.experts.active_size


MlpConfig = DenseConfig | ExpertsConfig | XieluConfig | DenseAndExpertsConfig


def experts_of(mlp: MlpConfig | None) -> ExpertsConfig | None:
    """The experts of an MLP, if it has any."""
    mlp = mlp.experts if isinstance(mlp, DenseAndExpertsConfig) else mlp
    return mlp if isinstance(mlp, ExpertsConfig) else None


def dense_like(mlp: MlpConfig) -> DenseConfig:
    """Without biases, and with as many hidden units as a token goes through: for draft heads."""
    has_experts = isinstance(mlp, ExpertsConfig | DenseAndExpertsConfig)
    return DenseConfig(mlp.active_size if has_experts else mlp.intermediate_size)
