"""Configs of models. Those of layers, and of what layers are made of, are in files beside this."""

import dataclasses
from collections.abc import Callable

from jaxspec.config.checks import check_positive
from jaxspec.config.layer import LayerConfig
from jaxspec.config.mixers import (
    AttentionConfig,
    BlockSparseConfig,
    IndexedAttentionConfig,
    LatentConfig,
    MixerConfig,
)
from jaxspec.config.mlps import DenseConfig, dense_like
from jaxspec.config.mtp import MtpConfig
from jaxspec.config.rope import (
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeConfig,
    RopeScaling,
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: the configs of its layers, and model-wide sizes.

    Attributes:
      norm_offset: what norms multiply by is the checkpoint's weight plus this (Gemma's and Qwen
        3.5's norms are stored as w and multiply by 1 + w). It is added when weights are read.
      embed_scale: embeddings are multiplied by it. Draft heads read them as they are.
      logit_divisor: logits are divided by it.
      logit_softcap: logits x become logit_softcap * tanh(x / logit_softcap).
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
    embed_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    mtp: MtpConfig | None = None

    def __post_init__(self):
        check_positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        check_positive(rms_norm_eps=self.rms_norm_eps, max_position=self.max_position)
        check_positive(num_layers=self.num_layers)
        check_positive(embed_scale=self.embed_scale, logit_divisor=self.logit_divisor)
        if self.logit_softcap is not None:
            check_positive(logit_softcap=self.logit_softcap)
        if len({layer.centred for layer in self.layers}) > 1:
            raise ValueError("the norms of all layers subtract the mean, or those of none")
        if len({layer.token_input for layer in self.layers}) > 1:
            raise ValueError("all layers read as many entries of a token, or none does")
        if len({layer.streams for layer in self.layers}) > 1:
            raise ValueError("all layers have the same residual streams")
        for index, layer in enumerate(self.layers):
            if layer.source is not None and not self._has_keys_before(layer.source, index):
                raise ValueError(f"layer {index} reads keys and values of layer {layer.source}, "
                    "which must be one before it with keys of its own")  # fmt: skip
        first = self.layers[0].mixer
        if isinstance(first, LatentConfig) and first.indexer and first.indexer.shared:
            raise ValueError("the first layer attends to what an earlier one chose: there is none")

    def _has_keys_before(self, source: int, index: int) -> bool:
        return source < index and isinstance(self.layers[source].mixer, AttentionConfig)

    def check_length(self, max_length: int) -> None:
        """Raise ValueError for sequences of more tokens than the model has positions."""
        if max_length > self.max_position:
            raise ValueError(
                f"max_length {max_length} exceeds the model's {self.max_position} positions"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state of each row, so that pages do not hold all of a prefix."""
        return any(layer.is_recurrent for layer in self.layers)

    @property
    def token_input(self) -> int:
        """Entries that each layer reads of its token besides the residual stream."""
        return self.layers[0].token_input

    @property
    def has_streams(self) -> bool:
        """Whether it has several residual streams."""
        return self.layers[0].streams is not None

    @property
    def has_norm(self) -> bool:
        """Whether the model norms what follows the layers. Streams that are read through gates are
        normed before that."""
        return self.layers[-1].norms != "none"

    @property
    def sources(self) -> frozenset[int]:
        """The layers whose keys and values others read."""
        return frozenset(layer.source for layer in self.layers if layer.source is not None)

    @property
    def centred(self) -> bool:
        """Whether norms subtract the mean first, the last one too."""
        return self.layers[0].centred

    def check_tree_depth(self, max_depth: int) -> None:
        """Raise ValueError unless every layer can verify a tree of ``max_depth``."""
        for layer in self.layers:
            for mixer in layer.mixers:
                mixer.check_tree_depth(max_depth)

    def map_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> "ModelConfig":
        """The same model with every layer's config changed."""
        return dataclasses.replace(self, layers=tuple(map(change, self.layers)))


def draft_layers(target: ModelConfig, count: int = 1, width: int | None = None) -> ModelConfig:
    """Llama layers with the sizes of a target's first attention layer, as draft heads have them:
    without its windows, biases, sinks, norms of queries and keys, and multipliers.

    ``width``: of the MLP; None: the target's, or what a token goes through of its experts.

    Raises ValueError for a target without such layers.
    """
    layers = ((mixer, layer.mlp) for layer in target.layers for mixer in layer.mixers)
    layers = ((_attention_of(mixer), mlp) for mixer, mlp in layers)
    dense = ((mixer, mlp) for mixer, mlp in layers if mixer is not None)
    mixer, mlp = next(dense, (None, None))
    if mlp is None:  # its layers have one block each
        mlp = next((layer.mlp for layer in target.layers if layer.mlp is not None), None)
    if mixer is None or mlp is None:
        raise ValueError("the target has no layer of attention and an MLP to take sizes from")
    rope = mixer.rope
    of_model = isinstance(rope.scaling, LongRopeScaling | ProportionalRopeScaling)
    scaling = None if of_model else rope.scaling
    plain = RopeConfig(mixer.head_dim, rope.theta, scaling)
    attention = AttentionConfig(mixer.num_heads, mixer.num_kv_heads, plain)
    layer = LayerConfig(attention, DenseConfig(width) if width else dense_like(mlp))
    return ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        rms_norm_eps=target.rms_norm_eps,
        max_position=target.max_position,
        layers=(layer,) * count,
        stop_token_ids=target.stop_token_ids,
    )


def _attention_of(mixer: MixerConfig) -> AttentionConfig | None:
    """What a mixer is besides what chooses positions, if it has grouped KV heads of its own."""
    chooses = isinstance(mixer, BlockSparseConfig | IndexedAttentionConfig)
    inner = mixer.attention if chooses else mixer
    return inner if isinstance(inner, AttentionConfig) else None


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
    rope_scaling: RopeScaling | None = None,
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
