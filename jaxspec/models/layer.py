"""A transformer layer: a mixer and an MLP, with norms before each, after each, or both.

The MLP may also read what the mixer reads. A layer may have a mixer alone, or an MLP alone.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry
from jaxspec.cache.side_by_side import SideBySideState
from jaxspec.config.model import LayerConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, AnyLinear
from jaxspec.models.mixers import LatentAttention, Mixer, mixer_shape
from jaxspec.models.mlps import Dense, Mlp, mlp_shape
from jaxspec.models.ngrams import Ngrams, ngrams_shape
from jaxspec.models.one_launch import layer_launch
from jaxspec.models.readers import OneReader
from jaxspec.models.shapes import vector
from jaxspec.models.streams import FoldedNorm, Streams, joined_norm, spread, streams_shape
from jaxspec.models.tensors import TensorMap
from jaxspec.models.token_inputs import TokenInput, token_input_shape
from jaxspec.parallel import ONE_SHARD, Layout, Shards
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class Layer(Pytree):
    """Weights of one layer. Any norm may be None: there is none at its place. So may the mixer or
    the MLP: the layer has one block.

    Attributes:
      input_norm: of what the mixer reads, or the MLP alone.
      post_norm: of what the MLP reads.
      mixer_norm, mlp_norm: of what mixer and MLP give.
      residual_scale: what mixer and MLP give is multiplied by it.
      token_input: adds what the layer reads of its token, after the MLP; None: nothing.
      source: index in the model of the layer whose keys and values the mixer reads, or None.
      rescale: what the residual stream is multiplied by after the layer; None: by nothing.
      streams: the layer has several residual streams; None: one.
      ngrams: adds to the streams what they get of the last tokens, before the mixer; None: nothing.
      parallel: the MLP reads what the mixer reads.
      recomputed: a gradient keeps the hidden states around it only, and computes it again.
    """

    input_norm: Array | None = array("hidden")
    mixer: Mixer | None
    post_norm: Array | None = array("hidden")
    mlp: Mlp | None
    mixer_norm: Array | None = array("hidden", default=None)
    mlp_norm: Array | None = array("hidden", default=None)
    token_input: TokenInput | None = None
    rescale: Array | None = array("features", default=None)  # [1]
    streams: Streams | None = None
    ngrams: Ngrams | None = None
    source: int | None = static(default=None)
    residual_scale: float = static(default=1.0)
    parallel: bool = static(default=False)
    recomputed: bool = static(default=False)

    @property
    def reader(self) -> AnyLinear | OneReader | None:
        """The projection that alone reads, or rounds, what the layer's first block reads, if there
        is one."""
        first = self.mlp if self.mixer is None else self.mixer
        return None if self.parallel or first is None else first.reader

    def init_state(self, geometry: Geometry, layout: Layout) -> Any:
        """The layer's empty state: a LayerState, or None if it keeps none."""
        state = None if self.mixer is None else self.mixer.init_state(geometry, layout)
        if self.ngrams is None:
            return state
        return SideBySideState(first=state, second=self.ngrams.init_state(geometry, layout))

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Layer":
        """The same, with every array replaced by ``tensor_map``'s result for layer ``prefix``.

        What checkpoints call post_attention_layernorm is the norm of what the mixer gives, where
        there is one, else that of what the MLP reads.
        """

        def norm(name: str, weight: Array | None) -> Any:
            return tensor_map.norm(f"{prefix}{name}_layernorm.weight", weight)

        before_mlp = "post_attention" if self.mixer_norm is None else "pre_feedforward"
        return self.replace(
            input_norm=norm("input", self.input_norm),
            mixer=self.mixer and self.mixer.mapped(prefix, tensor_map),
            post_norm=norm(before_mlp, self.post_norm),
            mlp=self.mlp and self.mlp.mapped(prefix, tensor_map),
            mixer_norm=norm("post_attention", self.mixer_norm),
            mlp_norm=norm("post_feedforward", self.mlp_norm),
            token_input=self.token_input and self.token_input.mapped(prefix, tensor_map),
            rescale=tensor_map.array(f"{prefix}layer_scalar", self.rescale),
            streams=self.streams and self.streams.mapped(prefix, tensor_map),
            ngrams=self.ngrams and self.ngrams.mapped(prefix, tensor_map),
        )


def run_layers(
    layers: tuple[Layer, ...],
    x: Array,  # [B, T, H] the residual stream
    mixer_input: Array,  # [B, T, in] input of the first mixer: x normed, or a wider array
    states: tuple,
    step: ForwardPass,
    last_norm: Array | FoldedNorm | None,
    beside: Array | None = None,  # [1, R, H]
    token_inputs: Sequence[Array | None] | None = None,  # [B, T, P] of each layer
) -> tuple[list[Array], Array, tuple]:
    """Run the layers one after the other.

    The input of each mixer and MLP is the residual stream, normed where the layer has a norm for
    it. That norm is computed together with the addition before it. ``beside``: rows that each mixer
    reads after the norm, as it reads them in ``mixer_input``; it gives those of x only.
    ``token_inputs``: see models/token_inputs.py. Layers of several residual streams begin with
    copies of x, or streams that x is, and norm what they read by themselves; what follows them
    reads the mean, or what a FoldedNorm makes of them.

    Returns (the residual stream after each layer, or its streams [B, T, N, H]; the last one normed
    by ``last_norm``; states).
    """
    inputs = [
        None if layer.streams else (layer.input_norm, layer.reader, beside) for layer in layers
    ]
    following_norms = [*inputs, (last_norm, None, None)][1:]  # none without layers
    residuals, new_states, normed, chosen = [], [], mixer_input, None
    given = token_inputs or (None,) * len(layers)
    for layer, state, following, of_token in zip(
        layers, states, following_norms, given, strict=True
    ):
        run_layer = functools.partial(_run_layer, step, following)
        if layer.recomputed:
            run_layer = jax.checkpoint(run_layer)
        if layer.source is not None:
            source: Any = layers[layer.source].mixer
            state = source.lent(new_states[layer.source])
        x, normed, state, chosen = run_layer(layer, x, normed, state, of_token, chosen)
        residuals.append(x)
        new_states.append(state)
    return residuals, normed, tuple(new_states)


def _run_layer(
    step: ForwardPass,
    following: tuple[Any, ...] | None,
    layer: Layer,
    x: Array,
    normed: Any,
    state: Any,
    of_token: Any,
    chosen: Array | None,
) -> tuple[Array, Any, Any, Array | None]:
    """The residual stream after a layer, what reads it next, the layer's state, and the positions
    that its indexer chose, else those that an earlier layer's did (see mixers/latent.py).

    ``following``: the norm of that input, its reader, and rows beside it; None: a layer of several
    residual streams follows, which reads these.
    """
    if layer.streams is not None:
        return _run_streams(step, following, layer, layer.streams, x, state, chosen)
    assert following is not None, "all layers of a model have as many residual streams"
    added: Addend | None = None
    if layer.mixer is not None:
        mixed, state, chosen = _mixed(layer.mixer, normed, state, step, chosen)
        added = step.scaled(x, mixed, layer.mixer_norm, layer.residual_scale)
    launched = None if added is None else _in_one_launch(layer, x, added, step)
    if launched is not None:
        x, added = launched
    elif layer.mlp is not None:
        read = normed
        if added is not None:
            x, after = step.add_norm(x, added, layer.post_norm, layer.mlp.reader)
            read = normed if layer.parallel else after
        added = step.scaled(x, layer.mlp(read, step), layer.mlp_norm, layer.residual_scale)
    assert added is not None, "a layer has a mixer or an MLP"
    if layer.token_input is not None:
        x, stream = step.add_norm(x, added, None)
        product = layer.token_input(stream, of_token, step)
        added = step.scaled(x, product, layer.token_input.norm, 1)
    x, added = step.rescaled(x, added, layer.rescale)
    return *step.add_norm(x, added, *following), state, chosen


def _mixed(
    mixer: Mixer, normed: Any, state: Any, step: ForwardPass, chosen: Array | None
) -> tuple[Addend, Any, Array | None]:
    """What a mixer adds, its state, and the positions that the next layer gets."""
    if isinstance(mixer, LatentAttention):
        return mixer.choosing(normed, state, step, chosen)
    return *mixer(normed, state, step), chosen


def _run_streams(
    step: ForwardPass,
    following: tuple[Any, ...] | None,
    layer: Layer,
    streams: Streams,
    x: Array,
    state: Any,
    chosen: Array | None,
) -> tuple[Array, Any, Any, Array | None]:
    """_run_layer of a layer of several residual streams, x [B, T, N, H]; before the first of them
    [B, T, H]."""
    assert layer.mixer is not None and layer.mlp is not None
    x, ngrams, of_ngrams = spread(x, streams.count), layer.ngrams, None
    if ngrams is not None:
        state, of_ngrams = (None, None) if state is None else (state.first, state.second)
        x, of_ngrams = ngrams(x, of_ngrams, step)
    connection, normed = streams.mixer.read(x, layer.input_norm, step)
    mixed, state, chosen = _mixed(layer.mixer, normed, state, step, chosen)
    if of_ngrams is not None:
        state = SideBySideState(first=state, second=of_ngrams)
    x = connection.after(mixed, step)
    connection, normed = streams.mlp.read(x, layer.post_norm, step)
    x = connection.after(layer.mlp(normed, step), step)
    last = None if following is None else joined_norm(x, following[0], step)
    return x, last, state, chosen


def _in_one_launch(
    layer: Layer, x: Array, added: Addend, step: ForwardPass
) -> tuple[Array, Addend] | None:
    """The residual stream before a layer's MLP, and what the MLP adds to it; None where they take
    several launches."""
    mlp = layer.mlp
    if layer.parallel or layer.mlp_norm is not None or layer.residual_scale != 1:
        return None
    if not isinstance(mlp, Dense) or mlp.config.activation != "silu":
        return None
    return layer_launch(step, x, added, layer.post_norm, mlp.gate_up, mlp.down)


def layer_shape(
    config: LayerConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards = ONE_SHARD,
    *,
    input_size: int | None = None,
    input_norm: bool = True,
) -> Layer:
    """A layer of ShapeDtypeStructs. ``input_size``: width of the mixer's input; ``input_norm``
    False: without a norm of it, whatever the config says."""
    before, after = config.norms not in ("after", "none"), config.norms in ("after", "both")
    mixer, mlp, streams = config.mixer, config.mlp, config.streams
    ngrams = None
    if config.ngrams is not None and streams is not None:
        ngrams = ngrams_shape(config.ngrams, (streams.count, hidden_size), dtype, shards)
    two_blocks, sizes = mixer is not None and mlp is not None, (hidden_size, dtype, shards)
    return Layer(
        input_norm=vector(hidden_size, dtype, when=before and input_norm),
        mixer=None if mixer is None else mixer_shape(mixer, *sizes, input_size=input_size),
        post_norm=vector(hidden_size, dtype, when=two_blocks and config.norms_for_mlp),
        mlp=None if mlp is None else mlp_shape(mlp, *sizes),
        mixer_norm=vector(hidden_size, dtype, when=after),
        mlp_norm=vector(hidden_size, dtype, when=after or config.norms == "both_of_mlp"),
        token_input=token_input_shape(config.token_input, hidden_size, dtype)
        if config.token_input
        else None,
        source=config.source,
        rescale=vector(1, dtype, when=config.rescaled),
        streams=streams_shape(streams, hidden_size, dtype) if streams else None,
        ngrams=ngrams,
        residual_scale=config.residual_scale,
        parallel=config.norms == "shared",
    )
