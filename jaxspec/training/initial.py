"""Random weights to begin training with."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.linear import Linear
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.shapes import weight_name
from jaxspec.training.optimizer import MATRICES

RESIDUAL_OUTPUTS = frozenset({"o", "down"})
EMBEDDING_SCALE = 0.02
ROWS = frozenset({"before", "qkv"})  # of corrections: weights whose rows are outputs
# Of recurrent layers, as in Mamba 2 (Dao and Gu, arXiv 2405.21060): a state forgets between a
# thousandth of itself and all of it at a token.
DECAY_RATES = (1.0, 16.0)
STEP_SIZES = (1e-3, 0.1)


def init_decoder(config: ModelConfig, seed: int) -> Decoder:
    """Random float32 weights: normal, scaled by the fan-in of each matrix.

    Matrices that add to the residual stream are also scaled by the number of layers. The numbers
    are drawn on the host, which needs no compilation.
    """
    generator = np.random.default_rng(seed)

    def init(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, ExpertLinear):
            fan_in = node.weight.shape[1]
            return jax.tree_util.tree_map_with_path(
                lambda inner, shape: _initial(
                    (*path, *inner), shape, fan_in, config.num_layers, generator
                ),
                node,
            )
        return _initial(path, node, node.shape[0], config.num_layers, generator)

    shapes = decoder_shapes(config, jnp.dtype(jnp.float32))
    return jax.tree_util.tree_map_with_path(
        init, shapes, is_leaf=lambda node: isinstance(node, ExpertLinear)
    )


def init_layers[T](shapes: T, num_layers: int, seed: int) -> T:
    """Random float32 weights of a draft head with so many layers, for its ShapeDtypeStructs:
    normal, scaled by the fan-in of each matrix. Norms are 1, and all else is 0."""
    generator = np.random.default_rng(seed)

    def init(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        fan_in = shape.shape[0] if shape.shape else 1
        return _initial(path, shape, fan_in, num_layers, generator)

    return jax.tree_util.tree_map_with_path(init, shapes)


def init_correction[T](shapes: T, seed: int) -> T:
    """Random float32 weights of a block head's correction, for its ShapeDtypeStructs: normal,
    scaled by the fan-in. Norms are 1. Biases and embeddings are 0, and so is the table that is read
    at the later token of a pair: at first tables say nothing of pairs."""
    generator = np.random.default_rng(seed)

    def normal(shape: Any, axis: int) -> Array:
        scale = shape.shape[axis] ** -0.5
        return jnp.asarray(scale * generator.standard_normal(shape.shape, np.float32))

    def init(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, Linear):
            bias = None if node.bias is None else jnp.zeros(node.bias.shape, jnp.float32)
            return node.replace(weight=normal(node.weight, 0), bias=bias)
        name = weight_name(path)
        if name in ROWS:
            return normal(node, 1)
        return jnp.full(node.shape, float("norm" in name), jnp.float32)

    return jax.tree_util.tree_map_with_path(
        init, shapes, is_leaf=lambda node: isinstance(node, Linear)
    )


def reads_last(fc: Linear, hidden: int) -> Linear:
    """A projection [C, H] that mostly passes on the last of the hidden states it reads, if it has
    their size ``hidden``."""
    weight = 0.1 * fc.weight
    if weight.shape[1] == hidden:
        weight = weight.at[-hidden:].add(jnp.eye(hidden))
    return fc.replace(weight=weight)


def _initial(
    path: tuple[Any, ...],
    shape: jax.ShapeDtypeStruct,
    fan_in: int,
    num_layers: int,
    generator: np.random.Generator,
) -> Array:
    name, size = weight_name(path), shape.shape
    if name == "base":  # of a block head's convolutions: at first tokens stay as they are
        identity = np.zeros(size, np.float32)
        identity[:, 0] = 1
        return jnp.asarray(identity)
    if name == "taps":  # of a convolution by channel
        return jnp.asarray(generator.uniform(-1, 1, size) / math.sqrt(fan_in), jnp.float32)
    if name == "a_log":
        return jnp.asarray(np.log(generator.uniform(*DECAY_RATES, size)), jnp.float32)
    if name == "dt_bias":  # the inverse of softplus
        steps = np.exp(generator.uniform(math.log(STEP_SIZES[0]), math.log(STEP_SIZES[1]), size))
        return jnp.asarray(np.log(np.expm1(steps)), jnp.float32)
    if name not in MATRICES:
        return jnp.asarray(np.full(size, "norm" in name or name == "skip", np.float32))
    scale = EMBEDDING_SCALE if name == "embed" else fan_in**-0.5
    if name in RESIDUAL_OUTPUTS:
        scale *= (2 * num_layers) ** -0.5
    return jnp.asarray(scale * generator.standard_normal(size, np.float32))
