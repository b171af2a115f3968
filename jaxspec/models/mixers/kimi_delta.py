"""Kimi delta attention: a delta rule with a decay of each channel, a causal convolution before it,
as in Kimi Linear (arXiv 2510.26692)."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import Geometry
from jaxspec.cache.channel_decay import ChannelInputs
from jaxspec.cache.delta_inputs import unit_length
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.config.recurrent import KimiDeltaConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product, linear_shape
from jaxspec.models.mixers.rows import check_whole_sequences, convolved
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, Stacked, TensorMap
from jaxspec.models.wrapped_tensors import Depthwise, Grouped, OfHeads, Part
from jaxspec.parallel import Layout, Shards, check_divides
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class KimiDelta(Pytree):
    """Weights of one layer of G heads of D entries. What is no matrix is float32, but for the
    convolution.

    Decays and gates are projections of vectors of D entries, which all heads share, or of the
    layer's input.
    """

    qkvb: Linear  # [in, G, 3 * D + 1]: query, key and value, which the convolution reads; strength
    fg_in: Linear | None  # [in, 2, D]: to the vectors of decays and of gates
    f: Linear  # [D, G, D], or [in, G, D]
    g: Linear  # [D, G, D], or [in, G, D]
    taps: Array = array("length", "kv_heads", "group")  # [K, G, 3 * D], the token's own last
    dt_bias: Array = array("kv_heads", "head_dim")  # [G, D]
    a_log: Array = array("kv_heads")  # [G]
    norm: Array = array("head_dim")  # [D]
    o: Linear  # [G * D, H]
    config: KimiDeltaConfig = static()

    def __call__(
        self, x: Array, state: DeltaState | None, step: ForwardPass
    ) -> tuple[Product, DeltaState | None]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state.

        Raises ValueError for devices that share sequences.
        """
        check_whole_sequences(step.layout)
        qkvb = self.qkvb.product(x, "qkvb").result(step.layout, step.kernels)
        decays, gates = (
            linear.product(source, "fg").result(step.layout, step.kernels)
            for source, linear in zip(self._sources(x, step), (self.f, self.g), strict=True)
        )
        with jax.named_scope("delta_rule"):
            out, state = self._mixed(qkvb, decays, state, step)
            out = self._gated(out[..., 0, :], gates, step.eps).astype(x.dtype)
        return self.o.product(out.reshape(*out.shape[:2], -1), "o"), state

    def _sources(self, x: Array, step: ForwardPass) -> Iterator[Array]:
        """What decays and gates are projections of."""
        if self.fg_in is None:
            yield from (x, x)
            return
        shared = self.fg_in.product(x, "fg").result(step.layout, step.kernels)
        yield from (shared[..., part, :] for part in range(2))

    def _mixed(
        self, qkvb: Array, decays: Array, state: DeltaState | None, step: ForwardPass
    ) -> tuple[Array, DeltaState | None]:
        """Outputs float32 [B, T, G, 1, D] of the recurrence, and the new state. Without a state
        the tokens are whole sequences, of which nothing is kept."""
        channels = qkvb[..., :-1]
        where, read = convolved(self, channels, state, step)
        q, k, v = jnp.split(jax.nn.silu(read), 3, axis=-1)
        steps = decays.astype(jnp.float32) + self.dt_bias
        if self.config.lowest is None:
            steps = jax.nn.softplus(steps)
        inputs = ChannelInputs(
            k=unit_length(k),
            v=v[..., None, :],
            g=self._log_decays(steps),
            beta=jax.nn.sigmoid(qkvb[..., -1:].astype(jnp.float32)),
        )
        q = unit_length(q) / self.config.head_dim**0.5
        return where.read(state, q, DeltaNodes(inputs=inputs, channels=channels), step.kernels)

    def _log_decays(self, steps: Array) -> Array:
        """Logs float32 [B, T, G, D] of the channels' decays, of their steps."""
        lowest = self.config.lowest
        if lowest is None:
            return -jnp.exp(self.a_log)[:, None] * steps
        return lowest * jax.nn.sigmoid(jnp.exp(self.a_log)[:, None] * steps)

    def _gated(self, out: Array, gates: Array, eps: float) -> Array:
        """The normed outputs times a sigmoid of their gates: float32 [B, T, G, D]."""
        scale = lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
        return out * scale * self.norm * jax.nn.sigmoid(gates.astype(jnp.float32))

    reader = None  # several projections read the input

    def init_state(self, geometry: Geometry, layout: Layout) -> DeltaState:
        """Rows without tokens. Raises ValueError for a layout that splits sequences."""
        check_whole_sequences(layout)
        config, dtype = self.config, jnp.dtype(self.qkvb.dtype)
        heads = self.qkvb.out_shape[0], 1, config.head_dim, config.head_dim
        return DeltaState.create(
            geometry, heads, config.taps, config.folded, dtype, layout, kind=ChannelInputs
        )

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "KimiDelta":
        """The same, with the map's result for ``<prefix>self_attn`` in place of every array.

        The norm multiplies by the checkpoint's weight as it is, whatever the model's offset.
        """
        module, size = f"{prefix}self_attn", self.config.head_dim
        inside = f"{module}."
        parts = [Part(f"{inside}{name}_proj", size) for name in "qkv"]
        taps = Grouped(tuple(Part(f"{inside}{name}_conv1d", size) for name in "qkv"))
        last = "" if self.fg_in is None else "_b"
        rates = One(module) if self.config.flat_rates else OfHeads(One(module))
        return self.replace(
            qkvb=tensor_map.linear(self.qkvb, Grouped((*parts, Part(f"{inside}b_proj", 1)))),
            fg_in=tensor_map.linear(
                self.fg_in, Stacked((f"{inside}f_a_proj", f"{inside}g_a_proj"))
            ),
            f=tensor_map.linear(self.f, Grouped((Part(f"{inside}f{last}_proj", size),))),
            g=tensor_map.linear(self.g, Grouped((Part(f"{inside}g{last}_proj", size),))),
            taps=tensor_map.of_source(Depthwise(taps), "weight", self.taps),
            dt_bias=tensor_map.of_source(Grouped((Part(module, size),)), "dt_bias", self.dt_bias),
            a_log=tensor_map.of_source(rates, "A_log", self.a_log),
            norm=tensor_map.array(f"{inside}o_norm.weight", self.norm),
            o=tensor_map.linear(self.o, One(f"{inside}o_proj")),
        )


def kimi_delta_shape(
    config: KimiDeltaConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards, input_size: int
) -> KimiDelta:
    """A KimiDelta of ShapeDtypeStructs. ``input_size``: width of the first projections' input.

    Raises ValueError for heads that cannot be split evenly over devices.
    """
    heads, size = config.num_heads, config.head_dim
    check_divides("heads of linear attention", heads, shards.of("kv_heads"))
    of_heads, inputs = ("hidden", "kv_heads", "group"), input_size if config.direct else size
    of_gates = "hidden" if config.direct else "features", "kv_heads", "head_dim"
    fg_in = None
    if not config.direct:
        fg_in = linear_shape(("hidden", "two", "features"), (input_size, 2, size), dtype)
    return KimiDelta(
        qkvb=linear_shape(of_heads, (input_size, heads, 3 * size + 1), dtype),
        fg_in=fg_in,
        f=linear_shape(of_gates, (inputs, heads, size), dtype),
        g=linear_shape(of_gates, (inputs, heads, size), dtype),
        taps=array_shape(config.taps, heads, 3 * size, dtype=dtype),
        dt_bias=array_shape(heads, size, dtype=jnp.float32),
        a_log=vector(heads, jnp.float32),
        norm=vector(size, jnp.float32),
        o=linear_shape(("heads", "hidden"), (heads * size, hidden_size), dtype),
        config=config,
    )
