"""The gated delta rule with a causal convolution before it, as in Qwen3-Next and Qwen 3.5."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import Geometry
from jaxspec.cache.delta_inputs import Strengths, Unprojected, projected_inputs
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product, linear_shape
from jaxspec.models.mixers.rows import check_whole_sequences, rows_of_pass
from jaxspec.models.readers import OneReader, plain_rows
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.models.wrapped_tensors import Depthwise, Grouped, Part
from jaxspec.parallel import UNSPLIT, Layout, Shards, check_divides
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class GatedDelta(Pytree):
    """Weights of one layer. G key heads with r value heads each; c = 2 Dk + r Dv channels of the
    convolution in each group: query, key, values. What is no matrix is float32."""

    qkvz: Linear  # [in, G, c + r * Dv]: the channels, then the values' gates
    ba: Linear  # [in, G, 2 * r]
    taps: Array = array("length", "kv_heads", "group")  # [K, G, c], the token's own last
    dt_bias: Array = array("kv_heads", "group")  # [G, r]
    a_log: Array = array("kv_heads", "group")  # [G, r]
    norm: Array = array("head_dim")  # [Dv]
    o: Linear  # [G * r * Dv, H]
    config: GatedDeltaConfig = static()

    def __call__(
        self, x: Any, state: DeltaState | None, step: ForwardPass
    ) -> tuple[Product, DeltaState | None]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state.

        Raises ValueError for devices that share sequences.
        """
        check_whole_sequences(step.layout)
        qkvz = self.qkvz.product(x, "qkvz").result(step.layout, step.kernels)
        ba = self._strengths(plain_rows(x), step)
        with jax.named_scope("delta_rule"):
            out, state = self._mixed(qkvz, ba, state, step)
            if self.config.gate == "silu":
                out = step.gated_heads(out, qkvz, self.norm, self.o)
            else:
                out = self._gated(out, qkvz, step.eps)
        return self.o.product(out, "o"), state

    def _gated(self, out: Array, qkvz: Array, eps: float) -> Array:
        """Outputs float32 [B, T, G, r, Dv] normed, times a sigmoid of their gates, which are last
        in ``qkvz``: [B, T, G * r * Dv]. No kernel does it."""
        gates = qkvz[..., -self.config.values_per_key * self.config.value_dim :]
        scale = lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
        opened = jax.nn.sigmoid(gates.reshape(out.shape).astype(jnp.float32))
        gated = (out * scale * self.norm * opened).astype(qkvz.dtype)
        return gated.reshape(*out.shape[:2], -1)

    def _strengths(self, x: Array, step: ForwardPass) -> Array | Unprojected:
        """Strengths and decays; where the kernel runs that may project them, what they are
        projected from."""
        whole = step.layout.product(self.ba.axes) == UNSPLIT and not step.layout.tokens
        if "delta_inputs" in step.kernels and whole and isinstance(self.ba, Linear):
            return Unprojected(x, jnp.moveaxis(self.ba.weight, 0, -1))
        return self.ba.product(x, "ba").result(step.layout, step.kernels)

    def _mixed(
        self, qkvz: Array, ba: Array | Unprojected, state: DeltaState | None, step: ForwardPass
    ) -> tuple[Array, DeltaState | None]:
        """Outputs float32 [B, T, G, r, Dv] of the recurrence, and the new state. Without a state
        the tokens are sequences of their own, of which nothing is kept."""
        where, before = rows_of_pass(self, (len(qkvz), qkvz.shape[1]), state, step)
        q, inputs = projected_inputs(
            before,
            qkvz,
            Strengths(ba, self.dt_bias, self.a_log),
            self.taps,
            self.config.key_dim,
            where.rows,
            where.tree,
            step.kernels,
        )
        return where.read(state, q, DeltaNodes(inputs=inputs, channels=qkvz), step.kernels)

    @property
    def reader(self) -> OneReader:
        return OneReader(linear=self.qkvz)

    def init_state(self, geometry: Geometry, layout: Layout) -> DeltaState:
        """Rows without tokens. Raises ValueError for a layout that splits sequences."""
        check_whole_sequences(layout)
        config, groups = self.config, self.qkvz.out_shape[0]
        heads = groups, config.values_per_key, config.key_dim, config.value_dim
        return DeltaState.create(
            geometry, heads, config.taps, config.folded, jnp.dtype(self.qkvz.dtype), layout
        )

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "GatedDelta":
        """The same, with the map's result for ``<prefix>linear_attn`` in place of every array.

        The norm multiplies by the checkpoint's weight as it is, whatever the model's offset.
        """
        module = f"{prefix}linear_attn"
        inside, config = f"{module}.", self.config
        groups, values = config.num_key_heads, config.values_per_key
        keys, wide = config.key_dim, values * config.value_dim

        def channels(name: str) -> tuple[Part, ...]:
            """Queries of all groups, then keys, then values."""
            return (
                Part(name, keys),
                Part(name, keys, groups * keys),
                Part(name, wide, 2 * groups * keys),
            )

        qkvz = (*channels(f"{inside}in_proj_qkv"), Part(f"{inside}in_proj_z", wide))
        ba = (Part(f"{inside}in_proj_b", values), Part(f"{inside}in_proj_a", values))
        if config.by_head:
            qkvz = (Part(f"{inside}in_proj_qkvz", 2 * (keys + wide)),)
            ba = (Part(f"{inside}in_proj_ba", 2 * values),)
        by_group = Grouped((Part(module, values),))
        return self.replace(
            qkvz=tensor_map.linear(self.qkvz, Grouped(qkvz)),
            ba=tensor_map.linear(self.ba, Grouped(ba)),
            taps=tensor_map.of_source(
                Depthwise(Grouped(channels(f"{inside}conv1d"))), "weight", self.taps
            ),
            dt_bias=tensor_map.of_source(by_group, "dt_bias", self.dt_bias),
            a_log=tensor_map.of_source(by_group, "A_log", self.a_log),
            norm=tensor_map.array(f"{inside}norm.weight", self.norm),
            o=tensor_map.linear(self.o, One(f"{inside}out_proj")),
        )


def gated_delta_shape(
    config: GatedDeltaConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards
) -> GatedDelta:
    """A GatedDelta of ShapeDtypeStructs. Raises ValueError for heads that cannot be split evenly
    over devices."""
    groups, values = config.num_key_heads, config.values_per_key
    check_divides("num_key_heads", groups, shards.of("kv_heads"))
    gates = values * config.value_dim
    channels = 2 * config.key_dim + gates
    columns = ("hidden", "kv_heads", "group")
    return GatedDelta(
        qkvz=linear_shape(columns, (hidden_size, groups, channels + gates), dtype),
        ba=linear_shape(columns, (hidden_size, groups, 2 * values), dtype),
        taps=array_shape(config.taps, groups, channels, dtype=dtype),
        dt_bias=array_shape(groups, values, dtype=jnp.float32),
        a_log=array_shape(groups, values, dtype=jnp.float32),
        norm=vector(config.value_dim, jnp.float32),
        o=linear_shape(("heads", "hidden"), (groups * gates, hidden_size), dtype),
        config=config,
    )
