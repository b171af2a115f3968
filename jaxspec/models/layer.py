"""A transformer layer: a mixer and an MLP, with a norm before each."""

import jax.numpy as jnp
from jax import Array

from jaxspec.config.model import LayerConfig
from jaxspec.models.forward import ForwardPass
from jaxspec.models.mixers import Mixer, mixer_shape
from jaxspec.models.mlps import Mlp, mlp_shape
from jaxspec.models.shapes import vector
from jaxspec.parallel import ONE_SHARD, Shards
from jaxspec.pytree import Pytree, array, pytree
from jaxspec.tensors import Filler


@pytree
class Layer(Pytree):
    """Weights of one layer. ``input_norm`` None: the mixer reads its input without a norm."""

    input_norm: Array | None = array("hidden")
    mixer: Mixer
    post_norm: Array = array("hidden")
    mlp: Mlp

    def filled(self, prefix: str, filler: Filler) -> "Layer":
        """The same, with every array replaced by ``filler``'s result for layer ``prefix``."""
        return self.replace(
            input_norm=filler.norm(f"{prefix}input_layernorm.weight", self.input_norm),
            mixer=self.mixer.filled(prefix, filler),
            post_norm=filler.norm(f"{prefix}post_attention_layernorm.weight", self.post_norm),
            mlp=self.mlp.filled(prefix, filler),
        )


def run_layers(
    layers: tuple[Layer, ...],
    x: Array,  # [B, T, H] the residual stream
    mixer_input: Array,  # [B, T, in] input of the first mixer: x normed, or a wider array
    states: tuple,
    step: ForwardPass,
    last_norm: Array | None,
) -> tuple[list[Array], Array, tuple]:
    """Run the layers one after the other.

    The input of each mixer and MLP is the normed residual stream. The norm is computed together
    with the addition before it.

    Returns (the residual stream after each layer, the last one normed by ``last_norm``, states).
    """
    following_norms = [*(layer.input_norm for layer in layers), last_norm][1:]
    residuals, new_states, normed = [], [], mixer_input
    for layer, state, following in zip(layers, states, following_norms, strict=True):
        mixed, state = layer.mixer(normed, state, step)
        x, normed = step.add_norm(x, mixed, layer.post_norm)
        x, normed = step.add_norm(x, layer.mlp(normed, step), following)
        residuals.append(x)
        new_states.append(state)
    return residuals, normed, tuple(new_states)


def layer_shape(
    config: LayerConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards = ONE_SHARD,
    *,
    input_size: int | None = None,
    input_norm: bool = True,
) -> Layer:
    """A layer of ShapeDtypeStructs. ``input_size``: width of the mixer's input."""
    return Layer(
        input_norm=vector(hidden_size, dtype, when=input_norm),
        mixer=mixer_shape(config.mixer, hidden_size, dtype, shards, input_size=input_size),
        post_norm=vector(hidden_size, dtype),
        mlp=mlp_shape(config.mlp, hidden_size, dtype, shards),
    )
