"""Mixers: the part of a layer that combines information across tokens. One file per kind."""

from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry
from jaxspec.config.entries import EntryAttentionConfig
from jaxspec.config.mixers import (
    AttentionConfig,
    BlockSparseConfig,
    IndexedAttentionConfig,
    LatentConfig,
    MixerConfig,
    SharedAttentionConfig,
    SideBySideConfig,
)
from jaxspec.config.recurrent import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    Mamba2Config,
    ShortConvConfig,
)
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, AnyLinear
from jaxspec.models.mixers.attention import Attention, attention_shape
from jaxspec.models.mixers.block_sparse import BlockSparseAttention, block_sparse_shape
from jaxspec.models.mixers.entry_attention import EntryAttention, entry_attention_shape
from jaxspec.models.mixers.gated_delta import GatedDelta, gated_delta_shape
from jaxspec.models.mixers.indexed_attention import (
    IndexedAttention,
    indexed_attention_shape,
)
from jaxspec.models.mixers.kimi_delta import KimiDelta, kimi_delta_shape
from jaxspec.models.mixers.latent import LatentAttention, latent_shape
from jaxspec.models.mixers.mamba2 import Mamba2, mamba2_shape
from jaxspec.models.mixers.shared_attention import SharedAttention, shared_attention_shape
from jaxspec.models.mixers.short_conv import ShortConv, short_conv_shape
from jaxspec.models.mixers.side_by_side import SideBySide
from jaxspec.models.readers import OneReader
from jaxspec.models.tensors import TensorMap
from jaxspec.parallel import ONE_SHARD, Layout, Shards

__all__ = [
    "Attention",
    "BlockSparseAttention",
    "EntryAttention",
    "GatedDelta",
    "IndexedAttention",
    "KimiDelta",
    "LatentAttention",
    "Mamba2",
    "Mixer",
    "SharedAttention",
    "ShortConv",
    "SideBySide",
    "mixer_shape",
]


class Mixer(Protocol):
    """A frozen pytree of weights; ``config`` describes it."""

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Addend, Any]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state. SharedAttention gets a LentKV in place of a state."""
        ...

    @property
    def reader(self) -> AnyLinear | OneReader | None:
        """The projection that alone reads the input, if there is one: it may get RoundedRows in
        place of an array (see models.linear). None: the input is an array."""
        ...

    def init_state(self, geometry: Geometry, layout: Layout) -> Any:
        """The layer's empty state: a LayerState, or None if it keeps none."""
        ...

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Mixer":
        """The same, with every array replaced by ``tensor_map``'s result."""
        ...


def mixer_shape(
    config: MixerConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards = ONE_SHARD,
    *,
    input_size: int | None = None,
) -> Mixer:
    """A mixer of ShapeDtypeStructs, of the kind that ``config`` describes.

    Raises ValueError for a config of unknown kind.
    """
    match config:
        case AttentionConfig():
            return attention_shape(config, hidden_size, dtype, shards, input_size=input_size)
        case IndexedAttentionConfig():
            if input_size is not None and input_size != hidden_size:
                raise ValueError("attention with an indexer reads hidden states alone: EAGLE-3 "
                    "heads have layers of another kind")  # fmt: skip
            return indexed_attention_shape(config, hidden_size, dtype, shards)
        case BlockSparseConfig():
            return block_sparse_shape(config, hidden_size, dtype, shards, input_size=input_size)
        case SharedAttentionConfig():
            return shared_attention_shape(config, hidden_size, dtype, shards, input_size=input_size)
        case GatedDeltaConfig():
            return gated_delta_shape(config, input_size or hidden_size, dtype, shards)
        case KimiDeltaConfig():
            return kimi_delta_shape(config, hidden_size, dtype, shards, input_size or hidden_size)
        case LatentConfig():
            if input_size is not None and input_size != hidden_size:
                raise ValueError("latent attention reads hidden states alone: EAGLE-3 heads have "
                    "layers of another kind")  # fmt: skip
            return latent_shape(config, hidden_size, dtype, shards)
        case EntryAttentionConfig():
            if input_size is not None and input_size != hidden_size:
                raise ValueError("attention to entries reads hidden states alone: EAGLE-3 heads "
                    "have layers of another kind")  # fmt: skip
            return entry_attention_shape(config, hidden_size, dtype, shards)
        case Mamba2Config():
            return mamba2_shape(config, hidden_size, dtype, shards, input_size or hidden_size)
        case ShortConvConfig():
            return short_conv_shape(config, hidden_size, dtype, shards, input_size=input_size)
        case SideBySideConfig(first, second):
            sizes = hidden_size, dtype, shards
            return SideBySide(
                first=mixer_shape(first, *sizes, input_size=input_size),
                second=mixer_shape(second, *sizes, input_size=input_size),
                config=config,
            )
    raise ValueError(f"no mixer is described by {config!r}: add its kind to models/mixers")
