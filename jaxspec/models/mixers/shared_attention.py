"""Attention that reads the keys and values of another layer (Gemma 4's E models)."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry
from jaxspec.config.mixers import SharedAttentionConfig
from jaxspec.models.attention_heads import LentKV
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import AnyLinear, Linear, Product, linear_shape
from jaxspec.models.mixers.attention import parallel_kv_heads
from jaxspec.models.shapes import vector
from jaxspec.models.tensors import HeadPart, One, TensorMap
from jaxspec.parallel import Layout, Shards
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class SharedAttention(Pytree):
    """Weights of one layer's queries, and of its output."""

    q: Linear  # [in, Q, D]
    o: Linear  # [Q * D, H]
    q_norm: Array | None = array("head_dim")
    config: SharedAttentionConfig = static()

    def __call__(self, x: Array, state: LentKV, step: ForwardPass) -> tuple[Product, None]:
        """From normed input [B, T, in] and the other layer's keys and values, those of the pass's
        tokens included, to the addend of the residual stream. The layer keeps nothing."""
        attention = self.config.attention
        heads = step.queries(self.q.product(x, "qkv"), attention, self.q_norm, state.kv_scales)
        out, _ = step.attend(state.state, heads, attention.window)
        return self.o.product(out.reshape(*out.shape[:2], -1), "o"), None

    @property
    def reader(self) -> AnyLinear | None:
        """The projection that alone reads the input, if there is one."""
        return self.q

    def init_state(self, geometry: Geometry, layout: Layout) -> None:
        """None: the layer keeps nothing."""

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "SharedAttention":
        """The same, with the map's result for ``<prefix>self_attn`` in place of every array."""
        module, head_dim = f"{prefix}self_attn.", self.config.attention.head_dim
        queries: Any = HeadPart(f"{module}q_proj", head_dim, last=False)
        return self.replace(
            q=tensor_map.linear(self.q, queries),
            o=tensor_map.linear(self.o, One(f"{module}o_proj")),
            q_norm=tensor_map.norm(f"{module}q_norm.weight", self.q_norm),
        )


def shared_attention_shape(
    config: SharedAttentionConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards,
    *,
    input_size: int | None = None,
) -> SharedAttention:
    """A SharedAttention of ShapeDtypeStructs. ``input_size``: width of the projection's input.

    Raises ValueError for heads that cannot be split evenly.
    """
    attention = config.attention
    parallel_kv_heads(attention, shards.of("heads"))  # devices have whole groups of queries
    num_heads, head_dim = attention.num_heads, attention.head_dim
    return SharedAttention(
        q=linear_shape(
            ("hidden", "heads", "head_dim"),
            (input_size or hidden_size, num_heads, head_dim),
            dtype,
            bias=attention.qkv_bias,
        ),
        o=linear_shape(
            ("heads", "hidden"),
            (num_heads * head_dim, hidden_size),
            dtype,
            bias=attention.o_bias,
        ),
        q_norm=vector(head_dim, dtype, when=attention.qk_norm),
        config=config,
    )
