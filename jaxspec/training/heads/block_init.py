"""A block head (DFlash, DSpark) to begin training with."""

import jax.numpy as jnp

from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.block_head import block_config, to_hf_block
from jaxspec.models.heads import (
    BlockConfig,
    BlockHead,
    MarkovConfig,
    block_head_shapes,
    default_block_capture,
)
from jaxspec.training.heads.block_loss import BlockMethod
from jaxspec.training.initial import init_layers, reads_last


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
    markov_rank: int = 0,
) -> BlockConfig:
    """The config of a head to train.

    Args:
      layers: the head's own, as heads.block_layers makes them.
      capture: see BlockConfig; None: five from early to late, at equal distances.

    Raises ValueError for a head that could not be loaded again.
    """
    dspark = method == "dspark"
    config = BlockConfig(
        model=layers,
        capture=capture or default_block_capture(target.num_layers),
        block_size=block_size,
        mask_token=mask_token,
        predicts_next=dspark,
        correction=MarkovConfig(markov_rank) if markov_rank else None,
        confidence=("output and token" if markov_rank else "output") if dspark else None,
    )
    shapes = block_head_shapes(config, target, jnp.dtype("float32"))
    block_config(to_hf_block(shapes, target), target)
    return config


def init_block_head(target: Decoder, config: BlockConfig, seed: int = 0) -> BlockHead:
    """A float32 head to train, with random weights except for these.

    ``fc`` starts as the identity on the last captured state, and the norm before the target's LM
    head as a copy of the target's. DSpark's Markov head adds nothing at first, and its confidence
    head says one half.
    """
    shapes = block_head_shapes(config, target.config, jnp.dtype("float32"))
    head = init_layers(shapes, config.model.num_layers, seed)
    head = head.replace(
        fc=reads_last(head.fc, target.config.hidden_size),
        # A copy, as training donates its state and the target's arrays must stay valid.
        norm=jnp.array(target.norm, jnp.float32),
    )
    if head.markov is None:
        return head
    markov = head.markov.replace(after=jnp.zeros_like(head.markov.after))
    return head.replace(correction=markov)
