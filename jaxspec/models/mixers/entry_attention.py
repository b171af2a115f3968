"""Attention to a window of tokens and to entries of spans of tokens (DeepSeek-V4).

Of a token one vector is kept that is key and value of all heads. Its last entries are rotated, so
what a head attends to is rotated back by the query's position: of a value's rotation the distance
between the two is left. An entry is such a vector, too. It stands for a span of tokens, and is a
sum of projections of these, channel by channel, by gates that are projections as well. In some
layers an indexer chooses the entries that a token attends to.

Heads are projected in groups first, then all together.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, PagedEntries
from jaxspec.config.entries import EntryAttentionConfig, EntryIndexerConfig, SpansConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.entry_heads import (
    EntryHeads,
    EntryIndexHeads,
    SpanRows,
    rotated_back,
    rotated_last,
)
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product, linear_shape
from jaxspec.models.norms import rms_norm, unweighted_norm
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import HeadPart, One, TensorMap
from jaxspec.parallel import Layout, Shards, check_divides
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.products import einsum_f32


@pytree
class Compressor(Pytree):
    """Weights that make entries of D numbers of spans of N tokens; C is D, or 2 * D if spans
    overlap.

    Attributes:
      values, gates: from the layer's input to [C] each.
      places: float32, what is added to gates by the token's place in its span.
      norm: of an entry.
    """

    values: Linear
    gates: Linear
    places: Array = array("past", "features")  # [N, C]
    norm: Array = array("features")
    overlapping: bool = static(default=False)

    def rows(self, x: Array, rope: RopeConfig, step: ForwardPass) -> SpanRows:
        """What entries are made of, of tokens with normed input [B, T, H]."""
        how = step.layout, step.kernels
        values = self.values.product(x, "values").result(*how)
        gates = self.gates.product(x, "gates").result(*how)
        rows = jnp.concatenate([values, gates], axis=-1)[:, :, None]
        return SpanRows(rows, self.places, self.norm, step.eps, rope, self.overlapping)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Compressor":
        """The same, with the map's result for ``<prefix>`` in place of every array."""
        return self.replace(
            values=tensor_map.linear(self.values, One(f"{prefix}kv_proj")),
            gates=tensor_map.linear(self.gates, One(f"{prefix}gate_proj")),
            places=tensor_map.array(f"{prefix}position_bias", self.places),
            norm=tensor_map.array(f"{prefix}kv_norm.weight", self.norm),
        )


@pytree
class EntryIndexer(Pytree):
    """Weights of an indexer of I heads with D entries.

    Attributes:
      q: from the queries' latent to the queries of all heads [I * D].
      weights: from the layer's input to the weights of the heads [I]; float32.
      keys: make a key of each span.
    """

    q: Linear
    weights: Linear
    keys: Compressor
    config: EntryIndexerConfig = static()

    @jax.named_scope("indexer")
    def __call__(
        self, x: Array, latent: Array, rope: RopeConfig, step: ForwardPass
    ) -> EntryIndexHeads:
        """Queries and weights of tokens with normed input [B, T, H] and latents of queries."""
        config, how = self.config, (step.layout, step.kernels)
        queries = self.q.product(latent, "q").result(*how)
        queries = queries.reshape(*x.shape[:2], config.num_heads, config.head_dim)
        queries = rotated_last(queries, step.ropes[rope])
        weights = self.weights.product(x.astype(jnp.float32), "weights").result(*how)
        keys = self.keys.rows(x, rope, step)
        return EntryIndexHeads(queries, weights * config.scale, keys, config.top_k)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "EntryIndexer":
        """The same, with the map's result for ``<prefix>`` in place of every array."""
        return self.replace(
            q=tensor_map.linear(self.q, One(f"{prefix}q_b_proj")),
            weights=tensor_map.linear(self.weights, One(f"{prefix}scorer.weights_proj")),
            keys=self.keys.mapped(prefix, tensor_map),
        )


@pytree
class EntryAttention(Pytree):
    """Weights of one layer's attention.

    Attributes:
      q_in: to the queries' latent, which a norm follows.
      q: to the queries of all heads [Q * D], each of which is normed without weights.
      kv_in: to a token's vector [D], which a norm follows.
      sinks: float32, a head's score for attending to nothing.
      o_in: from the heads of a group to group_rank numbers [Q / G * D, G, rank].
      o: from all of them to hidden states.
      compressor: makes entries; None: there are none.
      indexer: None: a token attends to all entries that it sees.
    """

    q_in: Linear
    q_norm: Array = array("features")
    q: Linear
    kv_in: Linear
    kv_norm: Array = array("features")
    sinks: Array = array("heads")
    o_in: Linear
    o: Linear
    compressor: Compressor | None = None
    indexer: EntryIndexer | None = None
    config: EntryAttentionConfig = static()

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Product, Any]:
        """From normed input [B, T, H] and the layer's state to the addend of the residual stream
        and the new state."""
        config, how = self.config, (step.layout, step.kernels)
        angles = step.ropes[config.rope]
        latent = rms_norm(self.q_in.product(x, "q").result(*how), self.q_norm, step.eps)
        queries = self.q.product(latent, "q").result(*how)
        queries = queries.reshape(*x.shape[:2], -1, config.head_dim)
        vectors = rms_norm(self.kv_in.product(x, "kv").result(*how), self.kv_norm, step.eps)
        spans, index = self.compressor, self.indexer
        heads = EntryHeads(
            queries=rotated_last(unweighted_norm(queries, step.eps), angles),
            vectors=rotated_last(vectors[:, :, None], angles),
            sinks=self.sinks,
            config=config,
            spans=None if spans is None else spans.rows(x, config.rope, step),
            index=None if index is None else index(x, latent, config.rope, step),
        )
        values, state = step.attend(state, heads, None)
        return self.o.product(self._of_groups(rotated_back(values, angles)), "o"), state

    def _of_groups(self, values: Array) -> Array:
        """What heads [B, T, Q, D] attend to, projected group by group: [B, T, G * rank]."""
        weight = self.o_in.dense(values.dtype)  # [G, rank, Q / G * D]
        grouped = values.reshape(*values.shape[:2], len(weight), -1)
        product = einsum_f32("btgi,gri->btgr", grouped, weight).astype(values.dtype)
        return product.reshape(*values.shape[:2], -1)

    reader = None  # several projections read the input

    def init_state(self, geometry: Geometry, layout: Layout) -> PagedEntries:
        """Empty pages of vectors, and of what entries and the indexer's keys are made of."""
        spans, config = self.config.spans, self.config
        of_spans = 0 if spans is None else spans.kept_of(config.head_dim)
        of_index = 0 if spans is None else spans.kept_of(config.index_dim)
        widths = config.head_dim, of_spans, of_index
        return PagedEntries.create(geometry, self.kv_in.dtype, layout, widths)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "EntryAttention":
        """The same, with the map's result for ``<prefix>self_attn`` in place of every array."""
        module, rank = f"{prefix}self_attn.", self.config.group_rank
        inner = f"{module}compressor."
        return self.replace(
            q_in=tensor_map.linear(self.q_in, One(f"{module}q_a_proj")),
            q_norm=tensor_map.array(f"{module}q_a_norm.weight", self.q_norm),
            q=tensor_map.linear(self.q, One(f"{module}q_b_proj")),
            kv_in=tensor_map.linear(self.kv_in, One(f"{module}kv_proj")),
            kv_norm=tensor_map.array(f"{module}kv_norm.weight", self.kv_norm),
            sinks=tensor_map.array(f"{module}sinks", self.sinks),
            o_in=tensor_map.linear(self.o_in, HeadPart(f"{module}o_a_proj", rank, last=False)),
            o=tensor_map.linear(self.o, One(f"{module}o_b_proj")),
            compressor=self.compressor and self.compressor.mapped(inner, tensor_map),
            indexer=self.indexer and self.indexer.mapped(f"{inner}indexer.", tensor_map),
        )


def entry_attention_shape(
    config: EntryAttentionConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards
) -> EntryAttention:
    """An EntryAttention of ShapeDtypeStructs.

    Raises ValueError for groups of heads that cannot be split evenly.
    """
    check_divides("o_groups", config.groups, shards.of("heads"))
    latent, width, spans = config.query_latent, config.head_dim, config.spans
    queries = config.num_heads * width
    inner = config.groups * config.group_rank
    grouped = queries // config.groups, config.groups, config.group_rank
    compressor = indexer = None
    if spans is not None:
        compressor = _compressor_shape(spans, hidden_size, width, dtype)
    if spans is not None and spans.indexer is not None:
        indexer = _indexer_shape(spans, spans.indexer, hidden_size, latent, dtype)
    return EntryAttention(
        q_in=linear_shape(("hidden", "features"), (hidden_size, latent), dtype),
        q_norm=vector(latent, dtype),
        q=linear_shape(("features", "kv_heads"), (latent, queries), dtype),
        kv_in=linear_shape(("hidden", "features"), (hidden_size, width), dtype),
        kv_norm=vector(width, dtype),
        sinks=vector(config.num_heads, jnp.float32),
        o_in=linear_shape(("features", "kv_heads", "head_dim"), grouped, dtype),
        o=linear_shape(("heads", "hidden"), (inner, hidden_size), dtype),
        compressor=compressor,
        indexer=indexer,
        config=config,
    )


def _compressor_shape(
    spans: SpansConfig, hidden_size: int, width: int, dtype: jnp.dtype
) -> Compressor:
    channels = spans.kept_of(width) // 2
    linear = linear_shape(("hidden", "features"), (hidden_size, channels), dtype)
    return Compressor(
        values=linear,
        gates=linear,
        places=array_shape(spans.size, channels, dtype=jnp.float32),
        norm=vector(width, dtype),
        overlapping=spans.overlapping,
    )


def _indexer_shape(
    spans: SpansConfig,
    config: EntryIndexerConfig,
    hidden_size: int,
    query_latent: int,
    dtype: jnp.dtype,
) -> EntryIndexer:
    heads, width = config.num_heads, config.head_dim
    float32 = jnp.dtype(jnp.float32)
    return EntryIndexer(
        q=linear_shape(("features", "features"), (query_latent, heads * width), dtype),
        weights=linear_shape(("hidden", "features"), (hidden_size, heads), float32),
        keys=_compressor_shape(spans, hidden_size, width, dtype),
        config=config,
    )
