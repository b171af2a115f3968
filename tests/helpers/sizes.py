"""Models of zeros, where only sizes count: nothing is compiled."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.evaluation.benchmarks.draft_heads import head_shapes_for
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.heads import DraftHead


def zeros[T](shapes: T) -> T:
    """Arrays of these shapes."""
    return jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))


def decoder_of_zeros(config: ModelConfig, dtype: jnp.dtype) -> Decoder:
    return zeros(decoder_shapes(config, dtype))


def head_of_zeros(target: ModelConfig, dtype: jnp.dtype) -> DraftHead:
    """Of the kind that benchmarks give a target."""
    head = zeros(head_shapes_for(target, dtype, None))
    assert isinstance(head, DraftHead)
    return head
