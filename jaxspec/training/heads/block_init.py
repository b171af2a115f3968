"""A block head (DFlash, DSpark, DFlash 2, LiLiCorr) to begin training with."""

import jax.numpy as jnp

from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder, norm_copy
from jaxspec.models.from_config.block_head import block_config, to_hf_block
from jaxspec.models.heads import (
    BlockConfig,
    BlockHead,
    block_head_shapes,
    default_block_capture,
)
from jaxspec.training.heads.candidate_loss import BlockMethod
from jaxspec.training.heads.correction_sizes import CorrectionSizes, extra_of
from jaxspec.training.initial import init_correction, init_layers, reads_last


def default_mask(target: ModelConfig, known_tokens: int) -> int:
    """An id that no text has before a drafted token: the first past the tokenizer's, as published
    heads have it, if the embeddings have such a row, else the token that ends a text.

    Raises ValueError if the target has neither.
    """
    if known_tokens < target.vocab_size:
        return known_tokens
    if not target.stop_token_ids:
        raise ValueError(
            "the model has no unused token and none that ends a text: give a mask token"
        )
    return target.stop_token_ids[0]


def new_block_config(
    target: ModelConfig,
    layers: ModelConfig,
    method: BlockMethod,
    *,
    block_size: int,
    mask_token: int,
    capture: tuple[int, ...] | None = None,
    sizes: CorrectionSizes | None = None,
) -> BlockConfig:
    """The config of a head to train.

    Args:
      layers: the head's own, as heads.block_layers makes them.
      capture: see BlockConfig; None: five from early to late, at equal distances.
      sizes: of what it has beside DFlash's layers; None: as published.

    Raises ValueError for a head that could not be loaded again, and for sizes that do not fit.
    """
    dspark = method == "dspark"
    correction, convolution = extra_of(method, layers, block_size, sizes or CorrectionSizes())
    confidence = "output" if correction is None else "output and token"
    config = BlockConfig(
        model=layers,
        capture=capture or default_block_capture(target.num_layers),
        block_size=block_size,
        mask_token=mask_token,
        predicts_next=dspark,
        correction=correction,
        convolution=convolution,
        confidence=confidence if dspark else None,
    )
    shapes = block_head_shapes(config, target, jnp.dtype("float32"))
    block_config(to_hf_block(shapes, target), target)
    return config


def init_block_head(target: Decoder, config: BlockConfig, seed: int = 0) -> BlockHead:
    """A float32 head to train, with random weights except for these.

    ``fc`` starts as the identity on the last captured state, and the norm before the target's LM
    head as a copy of the target's. Convolutions leave everything as it is at first, DSpark's Markov
    head and DFlash 2's selector add nothing, and a confidence head says one half.
    """
    shapes = block_head_shapes(config, target.config, jnp.dtype("float32"))
    layers = shapes.replace(correction=None)
    head = init_layers(layers, config.model.num_layers, seed)
    correction = shapes.correction
    return head.replace(
        fc=reads_last(head.fc, target.config.hidden_size),
        # A copy, as training donates its state and the target's arrays must stay valid.
        norm=norm_copy(target),
        correction=None if correction is None else init_correction(correction, seed + 1),
    )
