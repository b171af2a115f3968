"""Configs of mixers: the part of a layer that combines information across tokens."""

import dataclasses

from jaxspec.config.checks import check_positive
from jaxspec.config.gated_delta import GatedDeltaConfig
from jaxspec.config.latent import LatentConfig
from jaxspec.config.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped KV heads.

    Attributes:
      window: a token attends to this many latest positions, its own included; None: to all.
      qk_norm: queries and keys are normed before they are rotated: each head by itself, or with
        ``whole_qk_norm`` all query heads as one vector, and all key heads.
      scale: of the scores; None: 1 / sqrt(head_dim).
      softcap: scores x become softcap * tanh(x / softcap).
      sinks: each query head has a score for attending to nothing (see paged_attention).
      fused: checkpoints have the three projections in one tensor, ``qkv_proj``.
      gated: what a head attends to is multiplied by a sigmoid of the token, entry by entry. In
        checkpoints ``q_proj`` has each head's query, then its gate.
    """

    num_heads: int
    num_kv_heads: int
    rope: RopeConfig
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    fused: bool = False
    gated: bool = False

    def __post_init__(self):
        check_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        for name in ("window", "scale", "softcap"):
            value = getattr(self, name)
            if value is not None:
                check_positive(**{name: value})
        if self.whole_qk_norm and not self.qk_norm:
            raise ValueError("whole_qk_norm says how queries and keys are normed: set qk_norm, too")
        if self.gated and (self.fused or self.whole_qk_norm):
            raise ValueError("gated attention has projections and norms of each head by itself")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.rope.head_dim

    @property
    def heads(self) -> str:
        """In words."""
        return f"{self.num_heads} query and {self.num_kv_heads} KV heads of {self.head_dim}"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return (self.rope,)

    def check_tree_depth(self, max_depth: int) -> None:
        """Raise ValueError unless the window shows every node of a tree all its ancestors."""
        if self.window is not None and self.window <= max_depth:
            raise ValueError(
                f"a tree of depth {max_depth} does not fit the model's sliding window of "
                f"{self.window} positions: choose a smaller depth"
            )


MixerConfig = AttentionConfig | GatedDeltaConfig | LatentConfig
