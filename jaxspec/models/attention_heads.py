"""The inputs of attention: heads of a qkv projection, of a projection to latents, of an indexer.

An Attend function (see forward_pass.py) takes them. They call no kernel by name.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import KVScales
from jaxspec.config.mixers import LatentConfig
from jaxspec.parallel import Axes
from jaxspec.parallel.collectives import all_tokens
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.products import einsum_f32, sum_partials
from pallas_kernels.rope_kv_write.reference import rotated_heads
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class Heads:
    """The input of attention: the heads of a qkv projection, not yet normed and rotated.

    Attributes:
      partials: [S, B, T, G, R, D] split-K partial sums. The R heads of a KV head are its queries,
        its key and its value. Rows past B are padding.
      dtype: of the sums.
      rope: a result of ``rope_angles``.
      q_norm, k_norm: [D] weights, or None.
      eps: epsilon of the norms.
      kv_scales: of keys and values in 8-bit pages, or None.
      scale, softcap, chunk: see AttentionConfig.
      sinks: float32 [Q] scores of a slot without a value (see paged_attention), or None.
      tokens: mesh axes that the tokens of ``partials`` are split over; ``rope`` is of all tokens.
      query_scale: float32, of the shape of queries [B, T, Q, D] or broadcast to it, of all tokens:
        queries are multiplied by it once they are rotated; None: they are not.
      chosen: the positions that tokens attend to, as of LatentHeads; None: all that they see.
    """

    partials: Array
    dtype: jnp.dtype
    rope: Array
    q_norm: Array | None
    k_norm: Array | None
    eps: float
    kernels: Kernels
    kv_scales: KVScales | None = None
    scale: float | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: Array | None = None
    tokens: Axes = ()
    query_scale: Array | None = None
    chosen: Array | None = None

    @property
    def scales(self) -> tuple[Array | None, Array | None]:
        """The scales [G] of keys and of values in 8-bit pages, or None."""
        kv_scales = self.kv_scales
        return (None, None) if kv_scales is None else (kv_scales.k, kv_scales.v)

    @property
    def local_count(self) -> int | None:
        """Tokens of this device, where they are split; else None."""
        return self.partials.shape[2] if self.tokens else None

    def of_all_tokens(self) -> "Heads":
        """The heads of all tokens, on every device."""
        if not self.tokens:
            return self
        qkv = sum_partials(self.partials, len(self.rope), self.dtype)
        whole = all_tokens(qkv, self.tokens, self.rope.shape[1])
        return dataclasses.replace(self, partials=whole[None], tokens=())

    def rotated(self) -> tuple[Array, Array, Array]:
        """Queries [B, T, Q, D], keys and values [B, T, G, D]."""
        qkv = sum_partials(self.partials, len(self.rope), self.dtype)
        queries, k, v = rotated_heads(qkv, self.rope, self.q_norm, self.k_norm, self.eps)
        return self.scaled(queries), k, v

    def scaled(self, queries: Array) -> Array:
        """Rotated queries [B, T, Q, D], multiplied by ``query_scale``."""
        return queries if self.query_scale is None else times(queries, self.query_scale)


@pytree
class PassKV(Pytree):
    """Keys and values of a pass without a cache, for layers that read those of another one: the
    state of that one. None before it has run."""

    k: Array | None = array("batch", "length", "kv_heads", "head_dim", default=None)
    v: Array | None = array("batch", "length", "kv_heads", "head_dim", default=None)


@pytree
class LentKV(Pytree):
    """Keys and values of another layer, those of the pass's tokens included.

    ``state``: that layer's, a PagedKV or a PassKV. ``kv_scales``: of 8-bit pages.
    """

    state: Any
    kv_scales: KVScales | None = None


@dataclasses.dataclass(frozen=True)
class QueryHeads:
    """The input of attention to keys and values that another layer has written.

    Attributes:
      rotated: queries [B, T, Q, D] of all tokens.
      local_count: tokens of this device, where what is attended to is split over devices by tokens;
        None: it is not.
      kernels, kv_scales, scale, softcap: as in Heads.
    """

    rotated: Array
    kernels: Kernels
    kv_scales: KVScales | None
    scale: float | None
    softcap: float | None
    local_count: int | None = None
    sinks: None = None

    @property
    def scales(self) -> tuple[Array | None, Array | None]:
        """The scales [G] of keys and of values in 8-bit pages, or None."""
        kv_scales = self.kv_scales
        return (None, None) if kv_scales is None else (kv_scales.k, kv_scales.v)


def times(x: Array, factor: Array) -> Array:
    """x times a float32 factor, in the dtype of x."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class LatentHeads:
    """The input of latent attention: what stands for Heads in an Attend function, which returns the
    heads' values.

    Attributes:
      plain, rotary: [B, T, Q, key_dim] and [B, T, Q, R], queries; ``rotary`` is rotated.
      stored: [B, T, 1, L + R], latents and rotated keys: what is kept of the tokens.
      key_up, value_up: [Q, key_dim, L] and [Q, value_dim, L], from a latent to the heads' keys and
        values.
      chosen: int32 [B, T, k], the positions that each token attends to, in ascending order; past
        the last one a number that is no position. None: to all that it sees.
      sinks: float32 [Q] scores of a slot without a value (see paged_attention), or None.
    """

    plain: Array
    rotary: Array
    stored: Array
    key_up: Array
    value_up: Array
    config: LatentConfig
    kernels: Kernels
    chosen: Array | None = None
    sinks: Array | None = None

    @property
    def queries(self) -> Array:
        """[B, T, Q, key_dim + R], of the heads' own keys."""
        return jnp.concatenate([self.plain, self.rotary], axis=-1)

    @property
    @jax.named_scope("attention")
    def absorbed(self) -> Array:
        """[B, T, Q, L + R], queries of what is stored."""
        queries = einsum_f32("btqk,qkl->btql", self.plain, self.key_up).astype(self.plain.dtype)
        return jnp.concatenate([queries, self.rotary], axis=-1)

    @jax.named_scope("attention")
    def values(self, attended: Array) -> Array:
        """Values [B, T, Q, value_dim] of sums of latents [B, T, Q, L]."""
        return einsum_f32("btql,qvl->btqv", attended, self.value_up).astype(attended.dtype)


@dataclasses.dataclass(frozen=True)
class IndexHeads:
    """What an indexer computes of a pass's tokens: an Attend function keeps the keys, and returns
    the positions that it chooses (see LatentHeads.chosen) in place of what heads attend to.

    The score of a position is the sum over heads of weight times relu(query . key).

    Attributes:
      queries: [B, T, I, D], of I heads, rotated.
      keys: [B, T, 1, D], rotated.
      weights: float32 [B, T, I], times the scale of the scores.
      top_k: most positions that a token attends to.
    """

    queries: Array
    keys: Array
    weights: Array
    top_k: int

    @property
    def kept(self) -> Array:
        """What is kept of the tokens: [B, T, 1, ...]."""
        return self.keys

    @property
    def most(self) -> int:
        """The most positions that a token attends to."""
        return self.top_k


@dataclasses.dataclass(frozen=True)
class PooledIndexHeads(IndexHeads):
    """IndexHeads of an indexer that scores pools of tokens (see latent_attention/pools.py).

    Attributes:
      gates: [B, T, 1, D], of the keys.
      places: [N, D], what is added to gates by a token's place in its pool.
    """

    gates: Array
    places: Array

    @property
    def kept(self) -> Array:
        """[B, T, 1, 2 * D], keys and gates."""
        return jnp.concatenate([self.keys, self.gates], axis=-1)

    @property
    def most(self) -> int:
        """The most positions that a token attends to, its unfinished pool's included."""
        return self.top_k + len(self.places) - 1
