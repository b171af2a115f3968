"""Draft heads of the sizes that published ones have, for random weights."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jaxspec.config.model import LayerConfig, ModelConfig, draft_layers
from jaxspec.models.heads import (
    BlockConfig,
    BlockHead,
    DraftHead,
    HeadConfig,
    block_head_shapes,
    block_layers,
    default_block_capture,
    default_capture,
    head_shapes,
    mtp_head_config,
)
from jaxspec.parallel import Shards

EAGLE3_VOCAB_SIZE = 32_000  # of the published EAGLE-3 heads
# Of the block heads that are published for Qwen3-8B (z-lab/dflash, deepseek-ai/DeepSpec).
BLOCK_LAYERS = 5  # they read as many hidden states of the target
DFLASH_BLOCK, DSPARK_BLOCK = 16, 7
MARKOV_RANK = 256

BlockKind = Literal["dflash", "dspark"]
HeadKind = BlockKind | Literal["auto"]
HEAD_KINDS: tuple[HeadKind, ...] = ("auto", "dflash", "dspark")
HEAD_HELP = "the drafter: an EAGLE-3 head or the shape's MTP layer (auto), or a block head"


def shapes_of_kind(
    target: ModelConfig, kind: HeadKind, dtype: jnp.dtype, shards: Shards
) -> DraftHead | BlockHead:
    """A head of ShapeDtypeStructs; "auto": the one of ``head_config``."""
    if kind == "auto":
        return head_shapes(head_config(target), target, dtype, shards)
    return block_head_shapes(block_head_config(target, kind), target, dtype, shards)


def head_config(target: ModelConfig) -> HeadConfig:
    """The MTP layer of a target that has one, else an EAGLE-3 head for it."""
    return eagle3_config(target) if target.mtp is None else mtp_head_config(target, target.mtp)


def eagle3_config(target: ModelConfig) -> HeadConfig:
    """An EAGLE-3 head with one Llama layer of the target's sizes, and a vocabulary of the size that
    published heads have."""
    model = draft_layers(target).map_layers(_without_scaling)
    capture = default_capture("eagle3", target.num_layers)
    vocab = min(EAGLE3_VOCAB_SIZE, target.vocab_size)
    return HeadConfig(model, "eagle3", capture, draft_vocab_size=vocab)


def block_head_config(target: ModelConfig, kind: BlockKind) -> BlockConfig:
    """A block head with Qwen3 layers of the target's sizes, which reads hidden states from early to
    late in the target, at equal distances."""
    model = block_layers(target, BLOCK_LAYERS).map_layers(_without_scaling)
    is_dspark = kind == "dspark"
    return BlockConfig(
        model=model,
        capture=default_block_capture(target.num_layers),
        block_size=DSPARK_BLOCK if is_dspark else DFLASH_BLOCK,
        mask_token=0,
        predicts_next=is_dspark,
        markov_rank=MARKOV_RANK if is_dspark else 0,
    )


def _without_scaling(layer: LayerConfig) -> LayerConfig:
    rope = dataclasses.replace(layer.attention.rope, scaling=None)
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, rope=rope))
