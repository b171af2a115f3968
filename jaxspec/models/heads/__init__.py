"""Draft heads: one common structure (DraftHead), and a front for each kind."""

import jax.numpy as jnp

from jaxspec.config.model import ModelConfig
from jaxspec.models.heads.block import (
    BlockConfig,
    BlockHead,
    block_head_shapes,
)
from jaxspec.models.heads.confidence import Confidence
from jaxspec.models.heads.config import (
    EagleMethod,
    HeadConfig,
    block_layers,
    check_capture,
    default_block_capture,
    default_capture,
)
from jaxspec.models.heads.corrections import MarkovConfig
from jaxspec.models.heads.eagle1 import Eagle1Front, eagle1_front_shape
from jaxspec.models.heads.eagle3 import Eagle3Front, eagle3_front_shape
from jaxspec.models.heads.head import (
    DraftHead,
    Front,
    FrontOutput,
    FrontShape,
    HeadOutput,
    MaskEntry,
)
from jaxspec.models.heads.mtp import (
    MtpFront,
    StreamsMtpFront,
    mtp_front_shape,
    mtp_head_config,
    mtp_states,
)
from jaxspec.models.layer import layer_shape
from jaxspec.models.linear import linear_shape
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.streams import fold_shape
from jaxspec.parallel import ONE_SHARD, Shards, fitting

__all__ = [
    "BlockConfig",
    "BlockHead",
    "Confidence",
    "DraftHead",
    "Eagle1Front",
    "Eagle3Front",
    "EagleMethod",
    "Front",
    "FrontOutput",
    "HeadConfig",
    "HeadOutput",
    "MarkovConfig",
    "MaskEntry",
    "MtpFront",
    "StreamsMtpFront",
    "block_head_shapes",
    "block_layers",
    "check_capture",
    "default_block_capture",
    "default_capture",
    "head_shapes",
    "mtp_head_config",
    "mtp_states",
]


def head_shapes(
    head: HeadConfig, target: ModelConfig, dtype: jnp.dtype, shards: Shards = ONE_SHARD
) -> DraftHead:
    """A head of ShapeDtypeStructs, laid out for ``shards``.

    Its hidden states are whole on every device: it has too few layers to gain by splitting them.

    Raises ValueError for sizes that cannot be split evenly.
    """
    shards = shards.one_dimensional
    config, front = head.model, front_shape(head, target, dtype)
    hidden, vocab = config.hidden_size, head.draft_vocab_size or target.vocab_size
    devices = shards.of("vocab")
    if front.has_lm_head and vocab % devices:
        raise ValueError(
            f"the draft vocabulary {vocab} cannot be split over {devices} devices; "
            f"{fitting(vocab, devices)}, or leave the head unsharded"
        )
    layers = tuple(
        layer_shape(
            layer,
            hidden,
            dtype,
            shards,
            input_size=hidden if index else front.mixer_input_size,
            input_norm=front.norms_input or index > 0,
        )
        for index, layer in enumerate(config.layers)
    )
    features = target.hidden_size * len(head.capture)
    mask = MaskEntry(hidden=array_shape(features, dtype=dtype), token=head.mask_token or 0)
    lm_head = linear_shape(("hidden", "vocab"), (hidden, vocab), dtype)
    return DraftHead(
        front=front.front,
        layers=layers,
        norm=vector(hidden, dtype, when=front.has_norm),
        lm_head=lm_head if front.has_lm_head else None,
        token_ids=array_shape(vocab, dtype=jnp.int32, when=head.draft_vocab_size is not None),
        embed=array_shape(target.vocab_size, hidden, dtype=dtype, when=head.has_embeddings),
        mask=None if head.mask_token is None else mask,
        fold=fold_shape(config.layers[0].streams, hidden, dtype),
        config=config,
        capture=head.capture,
        recycle_normed=head.norm_output,
        layout=shards.layout,
    )


def front_shape(head: HeadConfig, target: ModelConfig, dtype: jnp.dtype) -> FrontShape:
    """The shape of the front that ``head.method`` names."""
    match head.method:
        case "eagle3":
            return eagle3_front_shape(head, target, dtype)
        case "eagle1":
            return eagle1_front_shape(head, dtype)
        case "mtp":
            return mtp_front_shape(head, dtype)
