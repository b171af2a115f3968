"""Configs of mixers that keep a state of each row, and nothing in pages."""

import dataclasses
from typing import Literal

from jaxspec.config.checks import check_positive
from jaxspec.config.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig:
    """The gated delta rule: a recurrence whose state maps keys to values.

    ``taps``: width of the convolution before it. ``folded``: tokens that are folded into the state
    at once; those since are kept beside it (see cache/recurrent.py). ``by_head``: checkpoints have
    the input's projections in two tensors, ordered by key head, as Qwen3-Next's; else in four.
    ``gate``: what normed outputs are multiplied by, of a projection.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    folded: int = 16
    by_head: bool = False
    gate: Literal["silu", "sigmoid"] = "silu"

    def __post_init__(self):
        check_positive(num_key_heads=self.num_key_heads, num_value_heads=self.num_value_heads)
        check_positive(key_dim=self.key_dim, value_dim=self.value_dim, folded=self.folded)
        if self.taps < 2:
            raise ValueError(f"taps must be at least 2, got {self.taps}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads ({self.num_value_heads}) must be a multiple of "
                f"num_key_heads ({self.num_key_heads})"
            )

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def heads(self) -> str:
        """In words."""
        return (
            f"a recurrence with {self.num_key_heads} key heads of {self.key_dim} and "
            f"{self.num_value_heads} value heads of {self.value_dim}"
        )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """None: positions do not matter."""
        return ()

    def check_tree_depth(self, max_depth: int) -> None:
        """Trees of any depth."""


@dataclasses.dataclass(frozen=True)
class KimiDeltaConfig:
    """Kimi delta attention (arXiv 2510.26692): a delta rule with a decay of each channel of a key.

    Attributes:
      head_dim: of keys and of values, of which each head has one.
      taps: width of the convolution before it.
      folded: tokens that are folded into the state at once (see cache/recurrent.py).
      lowest: logs of decays are sigmoids times this number, which is below 0; None: minus a
        softplus times the head's rate.
      flat_rates: checkpoints have the heads' rates as a vector.
      direct: decays and gates are projections of the layer's input; else of vectors of ``head_dim``
        entries that all heads share.
    """

    num_heads: int
    head_dim: int
    taps: int = 4
    folded: int = 32
    lowest: float | None = None
    flat_rates: bool = False
    direct: bool = False

    def __post_init__(self):
        check_positive(num_heads=self.num_heads, head_dim=self.head_dim, folded=self.folded)
        if self.lowest is not None and not self.lowest < 0:
            raise ValueError(f"the lower bound of decays must be below 0, got {self.lowest}")
        if self.taps < 2:
            raise ValueError(f"taps must be at least 2, got {self.taps}")

    @property
    def heads(self) -> str:
        """In words."""
        return f"a recurrence with {self.num_heads} heads of {self.head_dim}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """None: positions do not matter."""
        return ()

    def check_tree_depth(self, max_depth: int) -> None:
        """Trees of any depth."""


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
    """A short causal convolution of each channel between two gates, as in LFM2: the input of a
    channel and what is read of it are multiplied by numbers of the token. It has as many channels
    as the hidden states.

    ``taps``: its width. ``bias``: of the convolution and of both projections.
    """

    taps: int = 3
    bias: bool = False

    def __post_init__(self):
        if self.taps < 2:
            raise ValueError(f"taps must be at least 2, got {self.taps}")

    @property
    def heads(self) -> str:
        """In words."""
        return f"a convolution of {self.taps} tokens"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """None: positions do not matter."""
        return ()

    def check_tree_depth(self, max_depth: int) -> None:
        """Trees of any depth."""


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 (arXiv 2405.21060): a state that decays and to which tokens add.

    Heads of a group share what the state is written at and read by.

    Attributes:
      state_dim, head_dim: N and P, the sizes of a head's state.
      taps: width of the convolution before it. ``taps_bias``: it has a bias.
      bias: of both projections.
      folded: tokens that are folded into the state at once (see cache/recurrent.py).
      norm: of what is read, in each group: before it is multiplied by SiLU of the gates, after
        that, or not at all.
      multipliers: of the rows of the first projection, which are multiplied when they are read: of
        gates, inputs, what is written at, what reads, and steps (which papers call z, x, B, C, dt).
      out_multiplier: the same of the output projection.
    """

    num_groups: int
    num_heads: int
    state_dim: int
    head_dim: int
    taps: int = 4
    taps_bias: bool = True
    bias: bool = False
    folded: int = 32
    norm: Literal["before gate", "after gate"] | None = "after gate"
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_multiplier: float = 1.0

    def __post_init__(self):
        check_positive(num_groups=self.num_groups, num_heads=self.num_heads, folded=self.folded)
        check_positive(state_dim=self.state_dim, head_dim=self.head_dim)
        for factor in (*self.multipliers, self.out_multiplier):
            check_positive(multipliers=factor)
        if self.taps < 2:
            raise ValueError(f"taps must be at least 2, got {self.taps}")
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_groups ({self.num_groups})"
            )

    @property
    def heads(self) -> str:
        """In words."""
        return (
            f"a recurrence with {self.num_heads} heads of {self.head_dim} and states of "
            f"{self.state_dim}"
        )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """None: positions do not matter."""
        return ()

    def check_tree_depth(self, max_depth: int) -> None:
        """Trees of any depth."""


# Mixers that keep a state of each row, and nothing in pages.
RecurrentConfig = GatedDeltaConfig | KimiDeltaConfig | Mamba2Config | ShortConvConfig
