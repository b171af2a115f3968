"""Configs of models: a decoder, its layers, and what the layers are made of."""

import dataclasses
from collections.abc import Callable

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.yarn import YarnRopeScaling


def _check_positive(**values: float) -> None:
    """Raise ValueError unless each value is above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent rope scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        _check_positive(**dataclasses.asdict(self))
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of heads of width ``head_dim``."""

    head_dim: int
    theta: float
    scaling: Llama3RopeScaling | YarnRopeScaling | None = None

    def __post_init__(self):
        _check_positive(head_dim=self.head_dim, rope_theta=self.theta)
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, not {self.head_dim}")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped KV heads.

    ``window``: a token attends to this many latest positions, its own included; None: to all.
    ``sinks``: each query head has a score for attending to nothing (see paged_attention).
    """

    num_heads: int
    num_kv_heads: int
    rope: RopeConfig
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False

    def __post_init__(self):
        _check_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        if self.window is not None:
            _check_positive(window=self.window)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.rope.head_dim

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope configs that this mixer uses."""
        return (self.rope,)

    def check_tree_depth(self, max_depth: int) -> None:
        """Raises ValueError unless the window shows every node of a tree all its ancestors."""
        if self.window is not None and self.window <= max_depth:
            raise ValueError(
                f"a tree of depth {max_depth} does not fit the model's sliding window of "
                f"{self.window} positions: choose a smaller depth"
            )


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A SwiGLU MLP."""

    intermediate_size: int
    bias: bool = False

    def __post_init__(self):
        _check_positive(intermediate_size=self.intermediate_size)


def dense_like(mlp: DenseConfig | ExpertsConfig) -> DenseConfig:
    """Without biases, and with as many hidden units as a token goes through: for draft heads."""
    size = mlp.active_size if isinstance(mlp, ExpertsConfig) else mlp.intermediate_size
    return DenseConfig(size)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One transformer layer: a mixer (attention) and an MLP."""

    mixer: AttentionConfig
    mlp: DenseConfig | ExpertsConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: the configs of its layers, and model-wide sizes."""

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position: int
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _check_positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        _check_positive(rms_norm_eps=self.rms_norm_eps, max_position=self.max_position)
        _check_positive(num_layers=self.num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

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
    rope_scaling: Llama3RopeScaling | YarnRopeScaling | None = None,
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
