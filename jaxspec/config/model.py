"""Configs of models: a decoder and its layers. What layers are made of is in files beside this."""

import dataclasses
from collections.abc import Callable

from jaxspec.config.checks import check_positive
from jaxspec.config.mixers import AttentionConfig, GatedDeltaConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.mtp import MtpConfig
from jaxspec.config.rope import Llama3RopeScaling, RopeConfig


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One transformer layer: a mixer (attention) and an MLP."""

    mixer: AttentionConfig
    mlp: DenseConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: the configs of its layers, and model-wide sizes.

    Attributes:
      norm_offset: what norms multiply by is the checkpoint's weight plus this (Gemma's and Qwen
        3.5's norms are stored as w and multiply by 1 + w). It is added when weights are read.
      mtp: the layers for multi-token prediction that its checkpoint has beside it.
    """

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position: int
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool = False
    stop_token_ids: tuple[int, ...] = ()
    norm_offset: int = 0
    mtp: MtpConfig | None = None

    def __post_init__(self):
        check_positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        check_positive(rms_norm_eps=self.rms_norm_eps, max_position=self.max_position)
        check_positive(num_layers=self.num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state of each row, so that pages do not hold all of a prefix."""
        return any(isinstance(layer.mixer, GatedDeltaConfig) for layer in self.layers)

    def check_tree_depth(self, max_depth: int) -> None:
        """Raises ValueError unless every layer can verify a tree of ``max_depth``."""
        for layer in self.layers:
            layer.mixer.check_tree_depth(max_depth)

    def map_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> "ModelConfig":
        """The same model with every layer's config changed."""
        return dataclasses.replace(self, layers=tuple(map(change, self.layers)))


def dense_model(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rms_norm_eps: float,
    rope_theta: float,
    max_position: int,
    sliding_windows: tuple[int | None, ...] | None = None,
    rope_scaling: Llama3RopeScaling | None = None,
    tie_word_embeddings: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    stop_token_ids: tuple[int, ...] = (),
) -> ModelConfig:
    """A model of attention and SwiGLU layers that differ only in their windows.

    ``sliding_windows`` has one entry per layer (see AttentionConfig.window); None: no windows.

    Raises ValueError if the number of windows is not the number of layers.
    """
    windows = (None,) * num_layers if sliding_windows is None else sliding_windows
    if len(windows) != num_layers:
        raise ValueError(f"sliding_windows has {len(windows)} entries for {num_layers} layers")
    rope = RopeConfig(head_dim, rope_theta, rope_scaling)
    layers = tuple(
        LayerConfig(
            AttentionConfig(num_heads, num_kv_heads, rope, window, qkv_bias, o_bias, qk_norm),
            DenseConfig(intermediate_size, mlp_bias),
        )
        for window in windows
    )
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        rms_norm_eps=rms_norm_eps,
        max_position=max_position,
        layers=layers,
        tie_word_embeddings=tie_word_embeddings,
        stop_token_ids=stop_token_ids,
    )
