"""Draft heads of the sizes that published ones have, for random weights."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config.model import LayerConfig, ModelConfig, draft_layers
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.config.quantization import Scheme
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.heads import (
    BlockConfig,
    BlockHead,
    DraftHead,
    HeadConfig,
    MarkovConfig,
    block_head_shapes,
    block_layers,
    default_block_capture,
    default_capture,
    head_shapes,
    mtp_head_config,
)
from jaxspec.models.quantized.lm_head_copy import with_lm_head_copy
from jaxspec.models.quantized.schemes import in_scheme
from jaxspec.parallel import Shards, mesh_layout

EAGLE3_VOCAB_SIZE = 32_000  # of the published EAGLE-3 heads
# Of the block heads that are published for Qwen3-8B (z-lab/dflash, deepseek-ai/DeepSpec).
BLOCK_LAYERS = 5  # they read as many hidden states of the target
DFLASH_BLOCK, DSPARK_BLOCK = 16, 7
MARKOV_RANK = 256

BlockKind = Literal["dflash", "dspark"]
HeadKind = BlockKind | Literal["auto", "mtp"]
HEAD_KINDS: tuple[HeadKind, ...] = ("auto", "mtp", "dflash", "dspark")
HEAD_HELP = (
    "the drafter: the shape's MTP layer if it has one, else an EAGLE-3 head (auto); an MTP layer "
    "for any shape, like the shape's last layer with attention, experts included, as "
    "train_drafter.py makes them (mtp); or a block head"
)
# What train_drafter.py takes for most families without an MTP layer; see models/families/family.py.
TRAINED_MTP = MtpConfig("deepseek", 1, AFTER)


def head_shapes_for(
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    *,
    kind: HeadKind = "auto",
    quantization: Scheme | None = None,
) -> DraftHead | BlockHead:
    """A head of ShapeDtypeStructs, sharded as its target is; "auto": the one of ``head_config``.

    ``quantization``: of all its matrices, and of a copy of the target's LM head if it has none;
    see models/quantized/schemes.py.
    """
    shards = Shards.over(mesh, mesh_layout(mesh))
    if kind == "auto" or kind == "mtp":
        config = head_config(target) if kind == "auto" else mtp_config(target)
        shapes = head_shapes(config, target, dtype, shards)
    else:
        shapes = block_head_shapes(block_head_config(target, kind), target, dtype, shards)
    if quantization is None:
        return shapes
    decoder = decoder_shapes(target, dtype, shards)
    shapes = with_lm_head_copy(shapes, decoder, lambda lm_head: lm_head)  # rounded as the rest
    return in_scheme(shapes, quantization, lm_head=True)


def head_config(target: ModelConfig) -> HeadConfig:
    """The MTP layer of a target that has one, else an EAGLE-3 head for it."""
    return eagle3_config(target) if target.mtp is None else mtp_config(target)


def mtp_config(target: ModelConfig) -> HeadConfig:
    """The target's MTP layer, or the one that is trained for a target that has none: like its last
    layer with attention, so with experts if that has some.

    Raises ValueError for a target of recurrent layers only.
    """
    return mtp_head_config(target, target.mtp or TRAINED_MTP)


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
        correction=MarkovConfig(MARKOV_RANK) if is_dspark else None,
    )


def _without_scaling(layer: LayerConfig) -> LayerConfig:
    rope = dataclasses.replace(layer.attention.rope, scaling=None)
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, rope=rope))
