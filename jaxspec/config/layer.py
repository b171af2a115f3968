"""The config of a layer."""

import dataclasses
from typing import Literal

from jaxspec.config.checks import check_positive
from jaxspec.config.mixers import (
    AttentionConfig,
    MixerConfig,
    RecurrentConfig,
    SideBySideConfig,
    SingleMixerConfig,
)
from jaxspec.config.mlps import MlpConfig


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One transformer layer: a mixer (attention) and an MLP.

    Attributes:
      norms: of what mixer and MLP read (``before``), of what they give (``after``), or ``both``.
        ``shared``: both read the same norm, and both are added at the end.
      rescaled: the residual stream after the layer is multiplied by a number of the checkpoint.
      centred: norms subtract the mean first, as LayerNorm without a bias does.
      residual_scale: what mixer and MLP give is multiplied by it.
    """

    mixer: MixerConfig
    mlp: MlpConfig
    norms: Literal["before", "after", "both", "shared"] = "before"
    residual_scale: float = 1.0
    centred: bool = False
    rescaled: bool = False

    def __post_init__(self):
        check_positive(residual_scale=self.residual_scale)

    @property
    def mixers(self) -> tuple[SingleMixerConfig, ...]:
        """Its mixer, or both of those that are side by side."""
        if isinstance(self.mixer, SideBySideConfig):
            return self.mixer.first, self.mixer.second
        return (self.mixer,)

    @property
    def is_recurrent(self) -> bool:
        """Whether it keeps a state of each row."""
        return any(isinstance(mixer, RecurrentConfig) for mixer in self.mixers)

    @property
    def attention(self) -> AttentionConfig:
        """The mixer, if it has grouped KV heads. Raises ValueError for any other kind."""
        if not isinstance(self.mixer, AttentionConfig):
            raise ValueError(
                f"layers of {type(self.mixer).__name__} are not supported here: only attention "
                "with grouped KV heads is"
            )
        return self.mixer
