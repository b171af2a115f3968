"""Multi-head latent attention (DeepSeek-V2 and V3, arXiv 2405.04434, 2412.19437).

Of a token one vector is kept: a latent [L], and a key that is rotated and shared by all heads [R].
A head's keys and values are projections of the latent. There are two ways to attend:

- absorbed: keys and values are never computed. The query is projected to the latent's space
  instead, and what the head attends to is projected to values afterwards. So attention is that of
  many queries to one KV head of L + R entries.
- expanded: keys and values of all heads are computed from the latents, and are narrower. That takes
  fewer operations where many tokens read (LatentConfig.expands).

Trees, and so all tokens that are decoded, always take the first; a prompt's tokens whichever is
cheaper (PagedAttend).

A layer may have an indexer (see indexer.py). Then a token attends to the positions that it chooses,
in the first form.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry
from jaxspec.cache.latent import PagedLatent
from jaxspec.config.mixers import LatentConfig
from jaxspec.models.attention_heads import LatentHeads, times
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product, linear_shape
from jaxspec.models.mixers.indexer import Indexer, indexer_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.rope import halves_of_pairs
from jaxspec.models.shapes import vector
from jaxspec.models.tensors import HeadPart, One, TensorMap
from jaxspec.parallel import Layout, Shards, check_divides
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class LatentAttention(Pytree):
    """Weights of one layer's latent attention.

    Attributes:
      q_in: to the queries' latent, None if they have none.
      q: to the queries of all heads [Q * (key_dim + R)], of each those that are rotated last.
      kv_in: to the latent and the rotated key [L + R].
      key_up, value_up: from the latent to all heads' keys [Q, key_dim] and values [Q, value_dim].
        One tensor in checkpoints; two here, as no product reads both.
      indexer: None: tokens attend to all positions, or to those that an earlier layer chose.
      gate: to a number for each head [Q], or for each of its values [Q * value_dim], whose sigmoid
        multiplies these; None: there is none.
      sinks: float32, a head's score for attending to nothing.
    """

    q_in: Linear | None
    q_norm: Array | None = array("features")
    q: Linear
    kv_in: Linear
    kv_norm: Array = array("features")
    key_up: Linear
    value_up: Linear
    o: Linear
    indexer: Indexer | None = None
    gate: Linear | None = None
    sinks: Array | None = array("heads", default=None)
    config: LatentConfig = static()

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Product, Any]:
        """From normed input [B, T, H] and the layer's state to the addend of the residual stream
        and the new state.

        Raises ValueError for a layer that attends to what an earlier one chose.
        """
        if self.config.indexer is not None and self.indexer is None:
            raise ValueError("the layer attends to what an earlier one chose: run both together")
        product, state, _ = self.choosing(x, state, step, None)
        return product, state

    def choosing(
        self, x: Array, state: Any, step: ForwardPass, chosen: Array | None
    ) -> tuple[Product, Any, Array | None]:
        """What a call returns, and the positions that the next layer gets. ``chosen``, int32
        [B, T, k], are those of the last layer before this that has an indexer; None: all."""
        config, dtype = self.config, x.dtype
        source = self._source_of_queries(x, step)
        if self.indexer is not None:
            index = self.indexer(x, source, config.rope, step)
            chosen, state = step.attend(state, index, None)
        queries = self.q.product(source, "q").result(step.layout, step.kernels)
        queries = queries.reshape(*x.shape[:2], -1, config.query_dim)
        if config.rope is not None:
            queries = step.scaled_queries(queries, config.rope)
        plain, rotary = jnp.split(queries, [config.key_dim], axis=-1)
        kept = self.kv_in.product(x, "kv").result(step.layout, step.kernels)
        latent, key = jnp.split(kept, [config.latent], axis=-1)
        with jax.named_scope("norm"):
            latent = rms_norm(latent, self.kv_norm, config.norm_eps)
        rotary, key = (self._rotated(part, step) for part in (rotary, key[:, :, None]))
        heads = LatentHeads(
            plain=plain,
            rotary=rotary,
            stored=jnp.concatenate([latent[:, :, None], key], axis=-1),
            key_up=self.key_up.dense(dtype),
            value_up=self.value_up.dense(dtype),
            config=config,
            kernels=step.kernels,
            chosen=chosen if config.indexer else None,
            sinks=self.sinks,
        )
        values, state = step.attend(state, heads, None)
        if self.gate is not None:
            gates = self.gate.product(x, "gate").result(step.layout, step.kernels)
            gates = gates.reshape(*values.shape[:3], -1).astype(jnp.float32)
            values = times(values, jax.nn.sigmoid(gates))
        flat = values.reshape(*x.shape[:2], -1)
        return self.o.product(flat, "o"), state, chosen

    def _source_of_queries(self, x: Array, step: ForwardPass) -> Array:
        """What queries are projections of: their normed latent, or the input itself."""
        if self.q_in is None:
            return x
        latent = self.q_in.product(x, "q").result(step.layout, step.kernels)
        with jax.named_scope("norm"):
            return rms_norm(latent, self.q_norm, self.config.norm_eps)

    def _rotated(self, x: Array, step: ForwardPass) -> Array:
        """Heads [B, T, n, R], rotated, in an order in which entries i and i + R / 2 are a pair."""
        rope = self.config.rope
        if rope is None:  # R is 0
            return x
        return step.rotated(halves_of_pairs(x) if self.config.interleaved else x, rope)

    reader = None  # several projections read the input

    def init_state(self, geometry: Geometry, layout: Layout) -> PagedLatent:
        """Empty pages of latents and rotated keys, and of the indexer's keys."""
        widths = self.config.stored_dim, self.config.index_dim
        return PagedLatent.create(geometry, self.kv_in.dtype, layout, *widths)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "LatentAttention":
        """The same, with the map's result for ``<prefix>self_attn`` in place of every array."""
        module, config = f"{prefix}self_attn.", self.config
        up = f"{module}kv_b_proj"
        size = config.key_dim + config.value_dim
        return self.replace(
            q_in=tensor_map.linear(self.q_in, One(f"{module}q_a_proj")),
            q_norm=tensor_map.array(f"{module}q_a_layernorm.weight", self.q_norm),
            q=tensor_map.linear(
                self.q, One(f"{module}{'q_proj' if self.q_in is None else 'q_b_proj'}")
            ),
            kv_in=tensor_map.linear(self.kv_in, One(f"{module}kv_a_proj_with_mqa")),
            kv_norm=tensor_map.array(f"{module}kv_a_layernorm.weight", self.kv_norm),
            key_up=tensor_map.linear(self.key_up, HeadPart(up, size, last=False)),
            value_up=tensor_map.linear(self.value_up, HeadPart(up, size, last=True)),
            o=tensor_map.linear(self.o, One(f"{module}o_proj")),
            indexer=self.indexer and self.indexer.mapped(f"{module}indexer.", tensor_map),
            gate=tensor_map.linear(self.gate, One(f"{module}g_proj")),
            sinks=tensor_map.array(f"{module}sinks", self.sinks),
        )


def latent_shape(
    config: LatentConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards
) -> LatentAttention:
    """A LatentAttention of ShapeDtypeStructs.

    Raises ValueError for heads that cannot be split evenly.
    """
    check_divides("num_attention_heads", config.num_heads, shards.of("heads"))
    compressed, heads = config.query_latent, config.num_heads
    queries = heads * config.query_dim
    q_in, q = None, linear_shape(("hidden", "kv_heads"), (hidden_size, queries), dtype)
    if compressed is not None:
        q_in = linear_shape(
            ("hidden", "features"), (hidden_size, compressed), dtype, bias=config.bias
        )
        q = linear_shape(("features", "kv_heads"), (compressed, queries), dtype)
    up, indexer, gate = ("features", "kv_heads", "head_dim"), None, None
    if config.gate is not None:
        gates = heads * (config.value_dim if config.gate == "entries" else 1)
        gate = linear_shape(("hidden", "kv_heads"), (hidden_size, gates), dtype)
    if config.index_dim:
        assert config.indexer is not None and compressed is not None
        indexer = indexer_shape(config.indexer, hidden_size, compressed, dtype)
    return LatentAttention(
        q_in=q_in,
        q_norm=vector(compressed or 0, dtype, when=compressed is not None),
        q=q,
        kv_in=linear_shape(
            ("hidden", "features"), (hidden_size, config.stored_dim), dtype, bias=config.bias
        ),
        kv_norm=vector(config.latent, dtype),
        key_up=linear_shape(up, (config.latent, heads, config.key_dim), dtype),
        value_up=linear_shape(up, (config.latent, heads, config.value_dim), dtype),
        o=linear_shape(
            ("heads", "hidden"), (heads * config.value_dim, hidden_size), dtype, bias=config.bias
        ),
        indexer=indexer,
        gate=gate,
        sinks=vector(heads, jnp.float32, when=config.sinks),
        config=config,
    )
