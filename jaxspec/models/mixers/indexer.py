"""The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556): a layer's tokens attend to the
positions that it scores best.

A few heads of queries meet one key of each token. Their products are much cheaper than attention,
and every device computes them all.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.indexer import IndexerConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.models.attention_heads import IndexHeads, PooledIndexHeads
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.norms import layer_norm
from jaxspec.models.rope import halves_of_pairs
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class PoolGate(Pytree):
    """Weights that join the keys of N tokens to one.

    Attributes:
      gate: from the layer's input to the gates of a token's key [D].
      places: what is added to gates by the token's place in its pool.
    """

    gate: Linear
    places: Array = array("past", "features")  # [N, D]

    def pooled(self, heads: IndexHeads, x: Array, step: ForwardPass) -> PooledIndexHeads:
        """The heads of tokens with normed input [B, T, H], which are pooled."""
        gates = self.gate.product(x, "gate").result(step.layout, step.kernels)
        how = heads.queries, heads.keys, heads.weights, heads.top_k
        return PooledIndexHeads(*how, gates[:, :, None], self.places)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "PoolGate":
        """The same, with the map's result for ``<prefix>`` in place of every array."""
        name = f"{prefix}index_kpool_compress_"
        return self.replace(
            gate=tensor_map.linear(self.gate, One(f"{name}gate")),
            places=tensor_map.array(f"{name}ape", self.places),
        )


@pytree
class Indexer(Pytree):
    """Weights of one layer's indexer, of I heads with D entries.

    Attributes:
      q: from the queries' latent to the queries of all heads [I * D].
      k: from the layer's input to a key [D], which a norm with a mean and a bias follows.
      weights: from the layer's input to the weights of the heads [I]; float32.
      pool: None: each token has a key.
    """

    q: Linear
    k: Linear
    k_norm: Array = array("features")
    k_norm_bias: Array = array("features")
    weights: Linear
    pool: PoolGate | None = None
    config: IndexerConfig = static()

    @jax.named_scope("indexer")
    def __call__(
        self, x: Array, latent: Array, rope: RopeConfig | None, step: ForwardPass
    ) -> IndexHeads:
        """Queries, keys and weights of tokens with normed input [B, T, H] and normed latents of
        queries. ``rope``: of the layer's own keys."""
        config, how = self.config, (step.layout, step.kernels)
        queries = self.q.product(latent, "q").result(*how)
        queries = queries.reshape(*x.shape[:2], config.num_heads, config.head_dim)
        keys = self.k.product(x, "k").result(*how)
        keys = layer_norm(keys, self.k_norm, config.norm_eps, bias=self.k_norm_bias)
        weights = self.weights.product(x.astype(jnp.float32), "weights").result(*how)
        queries, keys = (self._rotated(part, rope, step) for part in (queries, keys[:, :, None]))
        heads = IndexHeads(queries, keys, weights * config.scale, config.top_k)
        return heads if self.pool is None else self.pool.pooled(heads, x, step)

    def _rotated(self, x: Array, rope: RopeConfig | None, step: ForwardPass) -> Array:
        """Heads [B, T, R, D], of which the first entries are rotated, as many as ``rope`` has, or
        the last."""
        if rope is None:
            return x
        if self.config.rotates_last:
            rest, last = jnp.split(x, [x.shape[-1] - rope.head_dim], axis=-1)
            last = halves_of_pairs(last) if self.config.interleaved else last
            return jnp.concatenate([rest, step.rotated(last, rope)], axis=-1)
        if self.config.interleaved:
            first, rest = jnp.split(x, [rope.head_dim], axis=-1)
            x = jnp.concatenate([halves_of_pairs(first), rest], axis=-1)
        return step.rotated(x, rope)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Indexer":
        """The same, with the map's result for ``<prefix>`` in place of every array."""
        return self.replace(
            q=tensor_map.linear(self.q, One(f"{prefix}wq_b")),
            k=tensor_map.linear(self.k, One(f"{prefix}wk")),
            k_norm=tensor_map.array(f"{prefix}k_norm.weight", self.k_norm),
            k_norm_bias=tensor_map.array(f"{prefix}k_norm.bias", self.k_norm_bias),
            weights=tensor_map.linear(self.weights, One(f"{prefix}weights_proj")),
            pool=self.pool and self.pool.mapped(prefix, tensor_map),
        )


def indexer_shape(
    config: IndexerConfig, hidden_size: int, query_latent: int, dtype: jnp.dtype
) -> Indexer:
    """An Indexer of ShapeDtypeStructs."""
    heads, width, pool = config.num_heads, config.head_dim, None
    if config.pool > 1:
        pool = PoolGate(
            gate=linear_shape(("hidden", "features"), (hidden_size, width), dtype),
            places=array_shape(config.pool, width, dtype=dtype),
        )
    return Indexer(
        q=linear_shape(("features", "features"), (query_latent, heads * width), dtype),
        k=linear_shape(("hidden", "features"), (hidden_size, width), dtype),
        k_norm=vector(width, dtype),
        k_norm_bias=vector(width, dtype),
        weights=linear_shape(("hidden", "features"), (hidden_size, heads), jnp.dtype(jnp.float32)),
        pool=pool,
        config=config,
    )
