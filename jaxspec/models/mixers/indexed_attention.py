"""Attention with grouped KV heads to spans of tokens that an indexer chooses (Qwen3.8-Flash-Next).

The indexer has one key of each whole span: the mean of its tokens' keys, normed, and rotated at the
span's first position. A span's score is the sum over heads of relu(query . key). A token attends to
the tokens of the best spans that it sees whole, and always to those of its own unfinished one.

The indexer's products are much cheaper than attention, and every device computes them all.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, PagedIndexedKV
from jaxspec.config.indexer import MeanIndexerConfig
from jaxspec.config.mixers import IndexedAttentionConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product, linear_shape
from jaxspec.models.mixers.attention import Attention, attention_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import vector
from jaxspec.models.sparse_choice import MeanIndexHeads
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel import Layout, Shards
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class MeanIndexer(Pytree):
    """Weights of one layer's indexer, of I heads with D entries.

    Attributes:
      qk: to the queries of all heads, and to a key [(I + 1) * D].
      q_norm: of each head's queries; k_norm: of the means of keys.
    """

    qk: Linear
    q_norm: Array = array("features")
    k_norm: Array = array("features")
    config: MeanIndexerConfig = static()

    @jax.named_scope("indexer")
    def __call__(self, x: Array, rope: RopeConfig, step: ForwardPass) -> MeanIndexHeads:
        """Queries and keys of tokens with normed input [B, T, H]."""
        config = self.config
        heads = self.qk.product(x, "qk").result(step.layout, step.kernels)
        heads = heads.reshape(*x.shape[:2], config.num_heads + 1, config.head_dim)
        queries, keys = heads[:, :, :-1], heads[:, :, -1:]
        queries = step.rotated(rms_norm(queries, self.q_norm, step.eps), rope)
        weights = jnp.full(queries.shape[:-1], config.scale, jnp.float32)
        how = config.top_k, config.span, self.k_norm, step.eps, rope
        return MeanIndexHeads(queries, keys, weights, *how)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "MeanIndexer":
        """The same, with the map's result for ``<prefix>`` in place of every array."""
        return self.replace(
            qk=tensor_map.linear(self.qk, One(f"{prefix}index_qk_proj")),
            q_norm=tensor_map.norm(f"{prefix}q_layernorm.weight", self.q_norm),
            k_norm=tensor_map.norm(f"{prefix}k_layernorm.weight", self.k_norm),
        )


@pytree
class IndexedAttention(Pytree):
    """Weights of one layer: of its attention, and of its indexer."""

    attention: Attention
    indexer: MeanIndexer
    config: IndexedAttentionConfig = static()

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Product, Any]:
        """From normed input [B, T, H] and the layer's state to the addend of the residual stream
        and the new state."""
        index = self.indexer(x, self.config.index_rope, step)
        chosen, state = step.attend(state, index, None)
        return self.attention.attending(x, state, step, chosen)

    reader = None  # several projections read the input

    def init_state(self, geometry: Geometry, layout: Layout) -> PagedIndexedKV:
        """Empty pages of keys and values, and of the indexer's keys."""
        attention = self.attention
        sizes = (
            attention.qkv.out_shape[0],
            attention.config.head_dim,
            self.config.indexer.head_dim,
        )
        dtype = attention.qkv.dtype
        return PagedIndexedKV.empty(geometry, sizes, dtype, layout, attention.kv_scales)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "IndexedAttention":
        """The same, with the map's result for ``<prefix>self_attn`` in place of every array."""
        return self.replace(
            attention=self.attention.mapped(prefix, tensor_map),
            indexer=self.indexer.mapped(f"{prefix}self_attn.indexer.", tensor_map),
        )


def indexed_attention_shape(
    config: IndexedAttentionConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards
) -> IndexedAttention:
    """An IndexedAttention of ShapeDtypeStructs.

    Raises ValueError for heads that cannot be split evenly.
    """
    index = config.indexer
    outputs = (index.num_heads + 1) * index.head_dim
    indexer = MeanIndexer(
        qk=linear_shape(("hidden", "features"), (hidden_size, outputs), dtype),
        q_norm=vector(index.head_dim, dtype),
        k_norm=vector(index.head_dim, dtype),
        config=index,
    )
    attention = attention_shape(config.attention, hidden_size, dtype, shards)
    return IndexedAttention(attention=attention, indexer=indexer, config=config)
