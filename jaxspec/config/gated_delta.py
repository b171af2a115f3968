"""Configs of layers with the gated delta rule."""

import dataclasses

from jaxspec.config.checks import check_positive
from jaxspec.config.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig:
    """The gated delta rule: a recurrence whose state maps keys to values.

    ``taps``: width of the convolution before it. ``folded``: tokens that are folded into the state
    at once; those since are kept beside it (see cache/recurrent.py). ``by_head``: checkpoints have
    the input's projections in two tensors, ordered by key head, as Qwen3-Next's; else in four.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    folded: int = 32
    by_head: bool = False

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
