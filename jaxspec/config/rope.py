"""Configs of rotary position embeddings."""

import dataclasses

from jaxspec.config.checks import check_positive
from jaxspec.config.yarn import YarnRopeScaling


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent rope scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        check_positive(**dataclasses.asdict(self))
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of heads of width ``head_dim``.

    ``rotary_dim``: only so many leading entries of a head are rotated; 0: none, as in layers
    without positions. None: all.
    """

    head_dim: int
    theta: float
    scaling: Llama3RopeScaling | YarnRopeScaling | None = None
    rotary_dim: int | None = None

    def __post_init__(self):
        check_positive(head_dim=self.head_dim, rope_theta=self.theta)
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, not {self.head_dim}")
        own = self.rotary_dim
        if own is not None and (own % 2 or not 0 <= own < self.head_dim):
            raise ValueError(
                f"rotary_dim must be even and below head_dim {self.head_dim}, or None, got {own}"
            )
