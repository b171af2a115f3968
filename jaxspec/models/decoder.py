"""The decoder-only transformer of all supported model families.

Weights have one layout, whatever the checkpoint's. Query, key and value projections form one
Linear, grouped by KV head. Gate and up projections form another. Products contract a weight's first
dimension.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.model import ModelConfig
from jaxspec.models.attention import PagedAttend, layout_of_pass
from jaxspec.models.attention_heads import PassKV
from jaxspec.models.forward_pass import Attend, ForwardPass, make_pass
from jaxspec.models.layer import Layer, layer_shape, run_layers
from jaxspec.models.linear import AnyLinear, Linear, linear_shape
from jaxspec.models.pipeline_stage import Passage, new_passage
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.streams import AnyFold, FoldedNorm, fold_shape, joined
from jaxspec.models.table_rows import local_rows
from jaxspec.models.tensors import One, TensorMap
from jaxspec.models.token_inputs import TokenTable, token_table_shape
from jaxspec.parallel import ONE_SHARD, WHOLE, Axes, Layout, Shards, check_divides
from jaxspec.parallel.collectives import (
    all_gather,
    all_reduce,
    all_tokens,
    local_tokens,
    padded_tokens,
    reduce_scatter,
    shard_offset,
)
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.products import einsum_f32
from pallas_kernels.selection import NO_KERNELS, Kernels

# In a capture list: the hidden state after the final norm, and all residual streams before it.
FINAL_NORM, STREAMS = -1, -2


@pytree
class Decoder(Pytree):
    """Weights of a target model or a draft model.

    Vocabulary rows past ``config.vocab_size`` are padding, so that ``layout`` can split the
    vocabulary evenly.

    Attributes:
      layers: all of them; in a pipeline the last ones (see pipeline_stage.py).
      tokens: makes what layers read of a token besides the residual stream; None: nothing.
      norm: of what follows the layers; None: ``fold`` norms streams.
      fold: makes one residual stream of several before the last norm; None: there is one, or what
        follows reads the mean.
      exchange: memory in which devices add up row-parallel products, or thread blocks meet.
    """

    embed: Array = array("vocab", "whole_hidden")
    layers: tuple[Layer, ...]
    norm: Array | None = array("hidden")
    lm_head: Linear | None  # [H, V]; None: tied to embed
    tokens: TokenTable | None = None
    fold: AnyFold | None = None
    config: ModelConfig = static()
    layout: Layout = static(default=WHOLE)
    exchange: Array | None = array("peers", "cells", default=None)

    @property
    def dtype(self) -> jnp.dtype:
        return self.embed.dtype

    @property
    def local_vocab(self) -> int:
        """Vocabulary rows of this device (inside shard_map: of its shard)."""
        return self.embed.shape[0]

    def init_state(self, geometry: Geometry) -> ModelState:
        """Empty states of all layers."""
        states = (layer.init_state(geometry, self.layout) for layer in self.layers)
        return ModelState(layers=tuple(states), layout=self.layout)

    def no_states(self) -> LayerStates:
        """States for passes without a cache, which keep only what other layers read."""
        sources = self.config.sources
        return tuple(PassKV() if i in sources else None for i in range(len(self.layers)))

    def mapped(self, tensor_map: TensorMap) -> "Decoder":
        """The same, with every array replaced by ``tensor_map``'s result."""
        tensor_map = tensor_map.with_norms(self.config.norm_offset)
        head = One("lm_head", self.config.vocab_size)
        return self.replace(
            embed=tensor_map.array("model.embed_tokens.weight", self.embed),
            layers=tuple(
                layer.mapped(f"model.layers.{index}.", tensor_map)
                for index, layer in enumerate(self.layers)
            ),
            norm=tensor_map.norm("model.norm.weight", self.norm),
            lm_head=tensor_map.linear(self.lm_head, head),
            tokens=self.tokens and self.tokens.mapped(tensor_map),
            fold=self.fold and self.fold.mapped("model.", tensor_map),
        )


def decoder_shapes(config: ModelConfig, dtype: jnp.dtype, shards: Shards = ONE_SHARD) -> Decoder:
    """A Decoder of ShapeDtypeStructs, laid out for ``shards``.

    KV heads are repeated if there are fewer of them than shards. The vocabulary is padded to a
    multiple of its shards.

    Raises ValueError for sizes that cannot be split evenly.
    """
    vocab_shards = shards.of("vocab")
    vocab = -(-config.vocab_size // vocab_shards) * vocab_shards
    hidden, head = config.hidden_size, None
    check_divides("hidden_size", hidden, shards.of("hidden"))
    if not config.tie_word_embeddings:
        head = linear_shape(("whole_hidden", "vocab"), (hidden, vocab), dtype)
    return Decoder(
        embed=array_shape(vocab, hidden, dtype=dtype),
        layers=tuple(layer_shape(layer, hidden, dtype, shards) for layer in config.layers),
        norm=vector(hidden, dtype, when=config.has_norm),
        lm_head=head,
        tokens=token_table_shape(vocab, config.num_layers, config.token_input, hidden, dtype)
        if config.token_input
        else None,
        fold=fold_shape(config.layers[0].streams, hidden, dtype),
        config=config,
        layout=shards.layout,
    )


def norm_copy(decoder: Decoder) -> Array:
    """A float32 copy of the final norm [H]; ones for a model whose streams are normed before they
    are folded."""
    if decoder.norm is None:
        return jnp.ones(decoder.config.hidden_size, jnp.float32)
    return jnp.array(decoder.norm, jnp.float32)


@jax.named_scope("embed")
def embed(decoder: Decoder, tokens: Array) -> Array:
    """Token embeddings as the model's layers read them: int [B, T] -> [B, T, H]."""
    return _scaled(decoder, plain_embed(decoder, tokens))


@jax.named_scope("embed")
def plain_embed(decoder: Decoder, tokens: Array) -> Array:
    """Token embeddings as checkpoints have them, and draft heads read them: [B, T] -> [B, T, H]."""
    axes = decoder.layout.vocab
    return all_reduce(local_rows(decoder.embed, tokens, axes), axes)


def _scaled(decoder: Decoder, embedded: Array) -> Array:
    scale = decoder.config.embed_scale
    return embedded if scale == 1 else embedded * jnp.asarray(scale, embedded.dtype)


@jax.named_scope("embed")
def _embed_split(decoder: Decoder, tokens: Array, layout: Layout) -> Array:
    """Token embeddings as the layers read them: this device's part of the hidden states, and of
    tokens [B, T] where ``layout`` splits them."""
    return _scaled(decoder, _rows_split(decoder.embed, tokens, layout, layout.hidden))


def _rows_split(table: Array, tokens: Array, layout: Layout, columns: Axes) -> Array:
    """Rows of a table [V, C], split over the vocabulary, of tokens [B, T]: this device's part of
    the tokens, where ``layout`` splits them, and of the columns, which are split over mesh axes."""
    if layout.tokens:  # the sequence first, then the model
        tokens = padded_tokens(tokens, layout.tokens)
        tokens = local_tokens(tokens, layout.sequence)
    rows = local_rows(table, tokens, layout.vocab)
    over = tuple(axis for axis in layout.vocab if axis in layout.tokens)
    rows = reduce_scatter(rows, over, dimension=1)
    rows = reduce_scatter(rows, columns, dimension=2)
    rest = {*over, *columns}
    return all_reduce(rows, tuple(axis for axis in layout.vocab if axis not in rest))


def enter(decoder: Decoder, tokens: Array, attend: PagedAttend) -> Passage:
    """Tokens [B, T] before the first stage of a pipeline, at rotary positions
    ``attend.positions``."""
    return new_passage(embed(decoder, tokens), attend)


def run(
    decoder: Decoder,
    tokens: Array | Passage,
    positions: Array,
    states: LayerStates,
    attend: Attend,
    capture: tuple[int, ...] = (),
    kernels: Kernels = NO_KERNELS,
    *,
    isolate_blocks: bool = False,
) -> tuple[Array, LayerStates, Array | None]:
    """Run all layers over tokens [B, T] at rotary positions [B, T].

    The tokens may come as a Passage from the stages of a pipeline, which have run the layers that
    the decoder does not have.

    ``capture`` lists hidden states to return, concatenated: ``i`` is the residual stream after
    ``i`` layers, of several their mean; FINAL_NORM is the output itself, STREAMS are those of
    several after the last layer.

    ``isolate_blocks``: XLA compiles each block by itself (see ForwardPass), so that programs which
    capture other states, or do other things with the results, round alike.

    If a PagedAttend says that devices which share sequences split the tokens, all of them return
    all tokens.

    Returns (hidden after the final norm [B, T, H], states, captured [B, T, C] or None).
    """
    config = decoder.config
    eps, layout = config.rms_norm_eps, layout_of_pass(decoder.layout, attend)
    options: dict[str, Any] = {"isolate_blocks": isolate_blocks, "exchange": decoder.exchange}
    step = make_pass(config.layers, positions, attend, eps, layout, kernels, **options)
    if not isinstance(tokens, Passage):
        step = dataclasses.replace(step, token_ids=tokens)
    x = tokens.x if isinstance(tokens, Passage) else _embed_split(decoder, tokens, layout)
    norms = [layer.input_norm for layer in decoder.layers] + [decoder.norm]
    first = step.norm(x, norms[0])
    after, normed, states = run_layers(
        decoder.layers,
        x,
        first,
        states,
        step,
        decoder.norm if decoder.fold is None else FoldedNorm(decoder.fold, decoder.norm),
        token_inputs=_token_inputs(decoder, tokens, x, step),
    )
    residuals: dict[int, Any] = tokens.residuals if isinstance(tokens, Passage) else {}
    numbered = enumerate([x, *after], config.num_layers - len(decoder.layers))
    residuals |= dict(numbered) | {FINAL_NORM: normed}
    captured = None
    if capture:
        chosen = [state for i in capture for state in _captured(residuals, i, config.num_layers)]
        captured = _side_by_side(chosen, layout)
    num_tokens = positions.shape[1]
    whole = all_tokens(all_gather(normed, layout.hidden), layout.tokens, num_tokens)
    if captured is not None:
        captured = all_tokens(captured, layout.tokens, num_tokens)
    return whole, states, captured


@jax.named_scope("embed")
def _token_inputs(
    decoder: Decoder, tokens: Array | Passage, x: Array, step: ForwardPass
) -> list[Array] | None:
    """What each layer reads of tokens [B, T] besides the residual stream, whose embeddings are x
    [B, T, H]; None: layers read nothing."""
    table = decoder.tokens
    if table is None:
        return None
    assert not isinstance(tokens, Passage)  # no such model is split into stages
    rows = _rows_split(table.embed, tokens, step.layout, ())
    return table.inputs(rows, x, decoder.config.hidden_size, step)


def _captured(residuals: dict[int, Any], index: int, last: int) -> list[Array]:
    """Hidden states [B, T, H] of an entry of a capture list, by the residual streams after layers,
    of which ``last`` is the number."""
    if index == STREAMS:
        streams = residuals[last]
        return [streams[:, :, i] for i in range(streams.shape[2])]
    state = residuals[index]
    return [joined(state) if state.ndim == 4 else state]


def captured_size(config: ModelConfig, capture: tuple[int, ...]) -> int:
    """Entries of the hidden states that ``run`` returns for a capture list."""
    streams = config.layers[0].streams
    count = 1 if streams is None else streams.count
    return config.hidden_size * sum(count if index == STREAMS else 1 for index in capture)


def _side_by_side(states: list[Array], layout: Layout) -> Array:
    """Hidden states [B, T, H] of this device, gathered and concatenated: [B, T, n * H]."""
    if not layout.hidden:
        return jnp.concatenate(states, axis=-1)
    gathered = all_gather(jnp.stack(states, axis=-2), layout.hidden)
    return gathered.reshape(*gathered.shape[:2], -1)


@jax.named_scope("lm_head")
def logits(
    decoder: Decoder,
    hidden: Array,
    kernels: Kernels = NO_KERNELS,
    *,
    isolate_blocks: bool = False,
    lm_head: AnyLinear | None = None,
) -> Array:
    """This shard's float32 logits of normed hidden states: [..., H] -> [..., V / shards].

    ``isolate_blocks``: as in ``run``. ``lm_head``: takes the place of the decoder's own (see
    models/heads/lm_head.py).
    """
    if isolate_blocks:
        hidden = lax.optimization_barrier(hidden)
        return lax.optimization_barrier(logits(decoder, hidden, kernels, lm_head=lm_head))
    lm_head = decoder.lm_head if lm_head is None else lm_head
    if lm_head is None:
        scores = einsum_f32("...h,vh->...v", hidden, decoder.embed)
    else:
        scores = lm_head.float32(hidden, kernels)
    config, axes = decoder.config, decoder.layout.vocab
    vocab, cap = config.vocab_size, config.logit_softcap
    if config.logit_divisor != 1:
        scores = scores / config.logit_divisor
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if not axes and scores.shape[-1] == vocab:
        return scores
    ids = jnp.arange(scores.shape[-1]) + shard_offset(scores.shape[-1], axes)
    return jnp.where(ids < vocab, scores, -jnp.inf)
