"""Attention with grouped KV heads to blocks of positions (MiniMax M3).

For each KV head an index head scores the blocks that a token sees. A token has one index key for
all index heads, which is kept beside its keys and values. Products of index heads are much cheaper
than attention, and every device computes them for all KV heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, PagedIndexedKV
from jaxspec.config.mixers import BlockSparseConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.block_heads import BlockHeads
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product, linear_shape
from jaxspec.models.mixers.attention import Attention, attention_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel import Layout, Shards
from jaxspec.parallel.collectives import shard_offset
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class BlockIndexer(Pytree):
    """Weights of one layer's index heads, of I heads with D entries.

    Attributes:
      q: from the layer's input to the queries of all heads [I * D].
      k: to a key [D].
      q_norm, k_norm: of queries, each head by itself, and of keys.
    """

    q: Linear
    k: Linear
    q_norm: Array = array("features")
    k_norm: Array = array("features")

    @jax.named_scope("indexer")
    def __call__(self, x: Array, rope: RopeConfig, step: ForwardPass) -> tuple[Array, Array]:
        """Queries [B, T, I, D] and keys [B, T, 1, D] of tokens with normed input [B, T, H]."""
        how = step.layout, step.kernels
        queries = self.q.product(x, "index_q").result(*how)
        queries = queries.reshape(*x.shape[:2], -1, len(self.q_norm))
        keys = self.k.product(x, "index_k").result(*how)[:, :, None]
        pairs = (queries, self.q_norm), (keys, self.k_norm)
        queries, keys = (step.rotated(rms_norm(x, norm, step.eps), rope) for x, norm in pairs)
        return queries, keys

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "BlockIndexer":
        """The same, with the map's result for ``<prefix>`` in place of every array."""
        return self.replace(
            q=tensor_map.linear(self.q, One(f"{prefix}q_proj")),
            k=tensor_map.linear(self.k, One(f"{prefix}k_proj")),
            q_norm=tensor_map.norm(f"{prefix}q_norm.weight", self.q_norm),
            k_norm=tensor_map.norm(f"{prefix}k_norm.weight", self.k_norm),
        )


@pytree
class BlockSparseAttention(Pytree):
    """Weights of one layer's attention, and of its index heads."""

    attention: Attention
    indexer: BlockIndexer
    config: BlockSparseConfig = static()

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Product, Any]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state."""
        inner = self.attention
        product = inner.qkv.product(x, "qkv")
        norms = inner.q_norm, inner.k_norm
        heads = step.heads(product, x.dtype, inner.config, *norms, inner.kv_scales)
        queries, keys = self.indexer(x, inner.config.rope, step)
        queries = _of_device(queries, heads.partials.shape[3], step)
        chooses = BlockHeads(heads, queries, keys, self.config.index)
        out, state = step.attend(state, chooses, None)
        return inner.o.product(out.reshape(*out.shape[:2], -1), "o"), state

    reader = None  # several projections read the input

    def init_state(self, geometry: Geometry, layout: Layout) -> PagedIndexedKV:
        """Empty pages of keys and values, and of index keys."""
        inner = self.attention
        sizes = inner.qkv.out_shape[0], inner.config.head_dim, self.config.index.head_dim
        return PagedIndexedKV.empty(geometry, sizes, inner.qkv.dtype, layout, inner.kv_scales)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "BlockSparseAttention":
        """The same, with the map's result for ``<prefix>self_attn`` in place of every array."""
        return self.replace(
            attention=self.attention.mapped(prefix, tensor_map),
            indexer=self.indexer.mapped(f"{prefix}self_attn.index_", tensor_map),
        )


def _of_device(queries: Array, count: int, step: ForwardPass) -> Array:
    """Index queries [B, T, I, D] of all KV heads, as [B, T, G, D] of this device's ``count``."""
    axes = step.layout.axes("kv_heads")
    if not axes:
        return queries
    repeats = count * jax.lax.axis_size(axes) // queries.shape[2]
    head = (shard_offset(count, axes) + jnp.arange(count)) // repeats
    return jnp.take(queries, head, axis=2)


def block_sparse_shape(
    config: BlockSparseConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards,
    *,
    input_size: int | None = None,
) -> BlockSparseAttention:
    """A BlockSparseAttention of ShapeDtypeStructs. ``input_size``: width of what it reads.

    Raises ValueError for heads that cannot be split evenly.
    """
    inner, width = config.attention, config.index.head_dim
    inputs, sizes = input_size or hidden_size, (hidden_size, dtype, shards)
    queries = inner.num_kv_heads * width
    indexer = BlockIndexer(
        q=linear_shape(("hidden", "features"), (inputs, queries), dtype),
        k=linear_shape(("hidden", "features"), (inputs, width), dtype),
        q_norm=vector(width, dtype),
        k_norm=vector(width, dtype),
    )
    attention = attention_shape(inner, *sizes, input_size=input_size)
    return BlockSparseAttention(attention=attention, indexer=indexer, config=config)
