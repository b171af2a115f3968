"""Softmax attention with grouped KV heads, as in all dense model families."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, KVScales, PagedKV
from jaxspec.config.mixers import AttentionConfig
from jaxspec.models.attention_heads import LentKV
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, AnyLinear, Computed, Linear, Product, linear_shape
from jaxspec.models.norms import unweighted_norm
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import GroupedHeads, One, Source, TensorMap
from jaxspec.models.wrapped_tensors import Fused, scaled
from jaxspec.parallel import Layout, Shards, parallel_groups
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class Attention(Pytree):
    """Weights of one layer's attention. R = Q / G + 2: the query heads of a KV head, its key and
    its value. With gates of entries there is one after each query head: R = 2 Q / G + 2; those of
    whole heads are of ``gate``. Where values are keys, R = Q / G + 1. With ``kv_scales`` the cache
    has 8-bit pages (see quantized.kv_cache).

    ``q_norm`` and ``k_norm`` are norms of each head by itself, ``qk_norm`` [G, R - 1, D] are norms
    of all query heads as one vector and of all key heads."""

    qkv: Linear  # [in, G, R, D]
    o: Linear  # [Q * D, H]
    gate: Linear | None = None  # [in, Q]
    q_norm: Array | None = array("head_dim")
    k_norm: Array | None = array("head_dim")
    qk_norm: Array | None = array("kv_heads", "group", "head_dim", default=None)
    sinks: Array | None = array("heads", default=None)  # float32
    kv_scales: KVScales | None = None
    config: AttentionConfig = static()

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Product, Any]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state."""
        return self.attending(x, state, step, None)

    def attending(
        self, x: Array, state: Any, step: ForwardPass, chosen: Array | None
    ) -> tuple[Product, Any]:
        """What a call returns, of attention to ``chosen`` positions int32 [B, T, k] (see
        LatentHeads); None: to all that the config says."""
        product, gates = self._projected(x, step)
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.config.unit_qk_norm:
            q_norm = k_norm = jnp.ones(self.config.head_dim, x.dtype)
        heads = step.heads(
            product, x.dtype, self.config, q_norm, k_norm, self.kv_scales, self.qk_norm, self.sinks
        )
        heads = dataclasses.replace(heads, chosen=chosen)
        out, state = step.attend(state, heads, self.config.window)
        if gates is not None:
            with jax.named_scope("activation"):
                opened = jax.nn.sigmoid(gates.reshape(*out.shape[:3], -1).astype(jnp.float32))
                out = (out * opened).astype(out.dtype)
        return self.o.product(out.reshape(*out.shape[:2], -1), "o"), state

    @property
    def reader(self) -> AnyLinear | None:
        """The projection that alone reads the input, if there is one."""
        return self.qkv if self.gate is None else None

    def _projected(self, x: Array, step: ForwardPass) -> tuple[Addend, Array | None]:
        """Queries, keys and values, and the gates of what is attended to: [B, T, G, Q / G, D], or
        [B, T, Q] of heads."""
        product = self.qkv.product(x, "qkv")
        if self.config.value_norm or self.config.values_are_keys:
            return self._with_values(product, step), None
        if self.gate is not None:
            return product, self.gate.product(x, "gate").result(step.layout, step.kernels)
        if self.config.gate is None:
            return product, None
        both = product.result(step.layout, step.kernels)
        queries, gates = (both[..., first:-2:2, :] for first in range(2))
        return Computed(jnp.concatenate([queries, both[..., -2:, :]], axis=-2)), gates

    def _with_values(self, product: Product, step: ForwardPass) -> Computed:
        """Queries, keys and values of the projection, whose values may be the keys."""
        heads = product.result(step.layout, step.kernels)
        rest = heads if self.config.values_are_keys else heads[..., :-1, :]
        values = heads[..., -1:, :]
        if self.config.value_norm:
            values = unweighted_norm(values, step.eps)
        return Computed(jnp.concatenate([rest, values], axis=-2))

    def init_state(self, geometry: Geometry, layout: Layout) -> PagedKV:
        """Empty pages of keys and values."""
        sizes = self.qkv.out_shape[0], self.config.head_dim
        return PagedKV.create(geometry, *sizes, self.qkv.dtype, layout, self.kv_scales)

    def lent(self, state: Any) -> LentKV:
        """What other layers read of the layer's state after it has run."""
        return LentKV(state=state, kv_scales=self.kv_scales)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Attention":
        """The same, with the map's result for ``<prefix>self_attn`` in place of every array."""
        module, config = f"{prefix}self_attn.", self.config
        repeats = self.qkv.out_shape[0] // config.num_kv_heads
        values = None if config.values_are_keys else f"{module}v_proj"
        source: Source = GroupedHeads(
            f"{module}q_proj", f"{module}k_proj", values, repeats, config.interleaved
        )
        if config.fused:
            heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
            rows = tuple(count * config.head_dim for count in heads)
            source = Fused(f"{module}qkv_proj", source, rows)
        norms = GroupedHeads(f"{module}q_norm", f"{module}k_norm", None, repeats)
        return self.replace(
            qkv=tensor_map.linear(self.qkv, source),
            o=tensor_map.linear(self.o, scaled(One(f"{module}o_proj"), config.out_multiplier)),
            gate=tensor_map.linear(self.gate, One(f"{module}g_proj")),
            q_norm=tensor_map.norm(f"{module}q_norm.weight", self.q_norm),
            k_norm=tensor_map.norm(f"{module}k_norm.weight", self.k_norm),
            qk_norm=tensor_map.of_source(norms, "weight", self.qk_norm),
            sinks=tensor_map.array(f"{module}sinks", self.sinks),
        )


def attention_shape(
    config: AttentionConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards,
    *,
    input_size: int | None = None,
) -> Attention:
    """An Attention of ShapeDtypeStructs. ``input_size``: width of the qkv projection's input."""
    kv_heads, head_dim = parallel_kv_heads(config, shards.of("heads")), config.head_dim
    group = config.num_heads // kv_heads * (2 if config.gate == "entries" else 1) + 2
    projected = group - 1 if config.values_are_keys else group
    by_head = config.qk_norm and not config.whole_qk_norm
    gates = linear_shape(("hidden", "heads"), (input_size or hidden_size, config.num_heads), dtype)
    return Attention(
        qkv=linear_shape(
            ("hidden", "kv_heads", "group", "head_dim"),
            (input_size or hidden_size, kv_heads, projected, head_dim),
            dtype,
            bias=config.qkv_bias,
        ),
        o=linear_shape(
            ("heads", "hidden"),
            (config.num_heads * head_dim, hidden_size),
            dtype,
            bias=config.o_bias,
        ),
        gate=gates if config.gate == "heads" else None,
        q_norm=vector(head_dim, dtype, when=by_head),
        k_norm=vector(head_dim, dtype, when=by_head),
        qk_norm=array_shape(kv_heads, group - 1, head_dim, dtype=dtype, when=config.whole_qk_norm),
        sinks=vector(config.num_heads, jnp.float32, when=config.sinks),
        config=config,
    )


def parallel_kv_heads(config: AttentionConfig, devices: int) -> int:
    """KV heads as laid out over the devices: the model's, or one per device if it has fewer.

    Raises ValueError for heads that cannot be split evenly.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return parallel_groups(f"{heads} query and {kv_heads} KV heads", heads, kv_heads, devices)
