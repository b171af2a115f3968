"""The config of a layer."""

import dataclasses
from typing import Literal

from jaxspec.config.checks import check_positive
from jaxspec.config.mixers import (
    AttentionConfig,
    MixerConfig,
    SharedAttentionConfig,
    SideBySideConfig,
    SingleMixerConfig,
)
from jaxspec.config.mlps import DenseAndExpertsConfig, MlpConfig
from jaxspec.config.ngrams import NgramConfig
from jaxspec.config.recurrent import RecurrentConfig
from jaxspec.config.streams import AnyStreamsConfig, GatedStreamsConfig


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One transformer layer: a mixer (attention) and an MLP, or one of them alone.

    Attributes:
      mixer, mlp: None: there is none. A layer has one of them at least.
      norms: of what mixer and MLP read (``before``), of what they give (``after``), or ``both``.
        ``both_of_mlp``: of what both read, and of what the MLP gives.
        ``shared``: both read the same norm, and both are added at the end. ``none``: both read
        streams through gates, which are normed there.
      rescaled: the residual stream after the layer is multiplied by a number of the checkpoint.
      token_input: entries that the layer reads of its token besides the residual stream, after the
        MLP (see models/token_inputs.py); 0: none.
      centred: norms subtract the mean first, as LayerNorm without a bias does.
      residual_scale: what mixer and MLP give is multiplied by it.
      streams: there are several residual streams (see models/streams.py); None: there is one.
      ngrams: what streams that are read through gates get of the last tokens, before the mixer
        (see models/ngrams.py); None: nothing.
    """

    mixer: MixerConfig | None
    mlp: MlpConfig | None
    norms: Literal["before", "after", "both", "both_of_mlp", "shared", "none"] = "before"
    residual_scale: float = 1.0
    centred: bool = False
    rescaled: bool = False
    token_input: int = 0
    streams: AnyStreamsConfig | None = None
    ngrams: NgramConfig | None = None

    def __post_init__(self):
        check_positive(residual_scale=self.residual_scale)
        if self.mixer is None and self.mlp is None:
            raise ValueError("a layer has a mixer or an MLP")
        if (self.mixer is None or self.mlp is None) and self.norms != "before":
            raise ValueError("a layer of one block has a norm before it, and none after it")
        besides = self.residual_scale, self.centred, self.rescaled, self.token_input
        norms = "none" if isinstance(self.streams, GatedStreamsConfig) else "before"
        if self.streams and (self.norms != norms or besides != (1, False, False, 0)):
            raise ValueError("layers of several residual streams have norms before their blocks, "
                "which do not subtract the mean, and nothing besides")  # fmt: skip
        if self.norms == "none" and self.streams is None:
            raise ValueError("a layer without norms reads residual streams through gates")
        if self.ngrams and not (self.norms == "none" and self.is_recurrent):
            raise ValueError("n-grams are of recurrent layers with streams read through gates")
        if self.streams and (self.mixer is None or self.mlp is None):
            raise ValueError("a layer of several residual streams has a mixer and an MLP")

    @property
    def mixers(self) -> tuple[SingleMixerConfig, ...]:
        """Its mixer, both of those that are side by side, or none."""
        if isinstance(self.mixer, SideBySideConfig):
            return self.mixer.first, self.mixer.second
        return () if self.mixer is None else (self.mixer,)

    @property
    def is_recurrent(self) -> bool:
        """Whether it keeps a state of each row."""
        return any(isinstance(mixer, RecurrentConfig) for mixer in self.mixers)

    @property
    def source(self) -> int | None:
        """Index of the layer of the model whose keys and values the mixer reads, or None."""
        return self.mixer.source if isinstance(self.mixer, SharedAttentionConfig) else None

    @property
    def norms_for_mlp(self) -> bool:
        """Whether the MLP reads a norm of the layer: not that of the mixer, and not the residual
        stream itself, which it norms by its own norms."""
        of_layer = self.norms in ("before", "both", "both_of_mlp")
        return of_layer and not isinstance(self.mlp, DenseAndExpertsConfig)

    @property
    def units(self) -> int:
        """Hidden units of its MLP; 0 without one. Of experts those of each."""
        return 0 if self.mlp is None else self.mlp.intermediate_size

    @property
    def attention(self) -> AttentionConfig:
        """The mixer, if it has grouped KV heads. Raises ValueError for any other kind."""
        if not isinstance(self.mixer, AttentionConfig):
            raise ValueError(
                f"layers of {type(self.mixer).__name__} are not supported here: only attention "
                "with grouped KV heads is"
            )
        return self.mixer
