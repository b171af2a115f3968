"""Mamba-2: a state space layer with a causal convolution before it (Dao and Gu, arXiv 2405.21060),
as in Bamba, Granite 4 and Falcon-H1."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import Geometry
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.cache.state_space import SumInputs
from jaxspec.config.recurrent import Mamba2Config
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import AnyLinear, Linear, Product, linear_shape
from jaxspec.models.mixers.rows import check_whole_sequences, convolved
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, TensorMap
from jaxspec.models.wrapped_tensors import Depthwise, Grouped, Part, scaled
from jaxspec.parallel import Axes, Layout, Shards, parallel_groups
from jaxspec.parallel.collectives import all_gather
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class Mamba2(Pytree):
    """Weights of one layer. G groups with r heads of P entries each; c = 2 N + r P channels of the
    convolution in each group: what reads the state, what is written at, and the heads' inputs,
    which papers call C, B and x. What is no matrix is float32, but for the convolution.

    Where there are more devices than groups, each has a part of a group's heads, as a group: what
    reads and what is written at are repeated, and the norm is of all devices that share the group.
    """

    cbxzt: Linear  # [in, G, c + r * P + r]: the channels, the heads' gates, their steps
    taps: Array = array("length", "kv_heads", "group")  # [K, G, c], the token's own last
    taps_bias: Array | None = array("kv_heads", "group")  # [G, c]
    dt_bias: Array = array("kv_heads", "group")  # [G, r]
    a_log: Array = array("kv_heads", "group")  # [G, r]
    skip: Array = array("kv_heads", "group")  # [G, r]
    norm: Array | None = array("kv_heads", "group")  # [G, r * P]
    o: Linear  # [G * r * P, H]
    config: Mamba2Config = static()

    def __call__(
        self, x: Array, state: DeltaState | None, step: ForwardPass
    ) -> tuple[Product, DeltaState | None]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state.

        Raises ValueError for devices that share sequences.
        """
        check_whole_sequences(step.layout)
        product = self.cbxzt.product(x, "cbxzt").result(step.layout, step.kernels)
        with jax.named_scope("state_space"):
            width = self.taps.shape[-1]
            ends = [width, width + self._group_heads * self.config.head_dim]
            channels, gates, steps = jnp.split(product, ends, axis=-1)
            out, state = self._mixed(channels, steps, state, step)
            out = self._gated(out, gates, step).astype(product.dtype)
        return self.o.product(out.reshape(*out.shape[:2], -1), "o"), state

    def _mixed(
        self, channels: Array, steps: Array, state: DeltaState | None, step: ForwardPass
    ) -> tuple[Array, DeltaState | None]:
        """Outputs float32 [B, T, G, r, P] of the recurrence, and the new state. Without a state
        the tokens are whole sequences, of which nothing is kept."""
        where, read = convolved(self, channels, state, step)
        if self.taps_bias is not None:
            read = read + self.taps_bias.astype(jnp.float32)
        reads, writes, values = self._split(jax.nn.silu(read))
        dt = jax.nn.softplus(steps.astype(jnp.float32) + self.dt_bias)
        inputs = SumInputs(k=writes, v=values, g=-jnp.exp(self.a_log) * dt, beta=dt)
        new = DeltaNodes(inputs=inputs, channels=channels)
        out, state = where.read(state, reads, new, step.kernels)
        return out + self.skip[..., None] * values, state

    def _split(self, channels: Array) -> tuple[Array, Array, Array]:
        """What reads and what is written at [B, T, G, N], and inputs [B, T, G, r, P]."""
        width, shape = self.config.state_dim, channels.shape[:-1]
        reads, writes, values = jnp.split(channels, [width, 2 * width], axis=-1)
        return reads, writes, values.reshape(*shape, -1, self.config.head_dim)

    def _gated(self, out: Array, gates: Array, step: ForwardPass) -> Array:
        """The outputs times SiLU of their gates, normed in each group before or after that, or not:
        float32 [B, T, G, r * P]."""
        out, opened = out.reshape(gates.shape), jax.nn.silu(gates.astype(jnp.float32))
        if self.config.norm == "before gate":
            return self._normed(out, step) * opened
        return self._normed(out * opened, step)

    def _normed(self, out: Array, step: ForwardPass) -> Array:
        """Outputs [B, T, G, r * P], normed in each group; as they are without a norm."""
        if self.norm is None:
            return out
        mean = jnp.mean(out * out, axis=-1, keepdims=True)
        mean = _of_groups(mean, self.config.num_groups, step.layout.axes("kv_heads"))
        return out * lax.rsqrt(mean + step.eps) * self.norm

    @property
    def _group_heads(self) -> int:
        """Heads of a group, as laid out over devices."""
        return self.a_log.shape[-1]

    @property
    def reader(self) -> AnyLinear | None:
        """The projection that alone reads the input."""
        return self.cbxzt

    def init_state(self, geometry: Geometry, layout: Layout) -> DeltaState:
        """Rows without tokens. Raises ValueError for a layout that splits sequences."""
        check_whole_sequences(layout)
        config, groups = self.config, self.cbxzt.out_shape[0]
        heads = groups, self._group_heads, config.state_dim, config.head_dim
        dtype = jnp.dtype(self.cbxzt.dtype)
        return DeltaState.create(
            geometry, heads, config.taps, config.folded, dtype, layout, kind=SumInputs
        )

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Mamba2":
        """The same, with the map's result for ``<prefix>mamba`` in place of every array.

        The norm multiplies by the checkpoint's weight as it is, whatever the model's offset.
        """
        module = f"{prefix}mamba"
        config, inside = self.config, f"{module}."
        groups, heads = self.a_log.shape
        size, wide, repeats = config.state_dim, heads * config.head_dim, groups // config.num_groups
        inner, states = groups * wide, config.num_groups * size

        def channels(name: str, first: int, factors: tuple[float, ...]) -> tuple[Part, ...]:
            """Parts of rows from ``first`` on: the inputs of all groups, then what is written at,
            then what reads; ``factors`` in this order."""
            inputs, writes, reads = factors
            return (
                Part(name, size, first + inner + states, repeats, reads),
                Part(name, size, first + inner, repeats, writes),
                Part(name, wide, first, factor=inputs),
            )

        projection, convolution = f"{inside}in_proj", f"{inside}conv1d"
        last, (gates, *rest, steps) = 2 * (inner + states), config.multipliers
        parts = (
            *channels(projection, inner, tuple(rest)),
            Part(projection, wide, factor=gates),
            Part(projection, heads, last, factor=steps),
        )
        taps = Grouped(channels(convolution, 0, (1.0,) * 3))
        by_group = Grouped((Part(module, heads),))
        norm = Grouped((Part(f"{inside}norm", wide),))
        return self.replace(
            cbxzt=tensor_map.linear(self.cbxzt, Grouped(parts)),
            taps=tensor_map.of_source(Depthwise(taps), "weight", self.taps),
            taps_bias=tensor_map.of_source(taps, "bias", self.taps_bias),
            dt_bias=tensor_map.of_source(by_group, "dt_bias", self.dt_bias),
            a_log=tensor_map.of_source(by_group, "A_log", self.a_log),
            skip=tensor_map.of_source(by_group, "D", self.skip),
            norm=tensor_map.of_source(norm, "weight", self.norm),
            o=tensor_map.linear(self.o, scaled(One(f"{inside}out_proj"), config.out_multiplier)),
        )


def mamba2_shape(
    config: Mamba2Config, hidden_size: int, dtype: jnp.dtype, shards: Shards, input_size: int
) -> Mamba2:
    """A Mamba2 of ShapeDtypeStructs. ``input_size``: width of the first projection's input.

    Raises ValueError for heads that cannot be split evenly over devices.
    """
    groups = parallel_groups(
        f"{config.num_heads} Mamba heads in {config.num_groups} groups",
        config.num_heads,
        config.num_groups,
        shards.of("kv_heads"),
    )
    heads = config.num_heads // groups
    wide = heads * config.head_dim
    channels = 2 * config.state_dim + wide
    outputs = groups, channels + wide + heads
    of_heads = [array_shape(groups, heads, dtype=jnp.float32) for _ in range(3)]
    return Mamba2(
        cbxzt=linear_shape(
            ("hidden", "kv_heads", "group"), (input_size, *outputs), dtype, bias=config.bias
        ),
        taps=array_shape(config.taps, groups, channels, dtype=dtype),
        taps_bias=array_shape(groups, channels, dtype=dtype, when=config.taps_bias),
        dt_bias=of_heads[0],
        a_log=of_heads[1],
        skip=of_heads[2],
        norm=array_shape(groups, wide, dtype=jnp.float32, when=config.norm is not None),
        o=linear_shape(("heads", "hidden"), (groups * wide, hidden_size), dtype, bias=config.bias),
        config=config,
    )


def _of_groups(means: Array, num_groups: int, axes: Axes) -> Array:
    """Means [B, T, G, 1] over the heads of this device's groups -> over all heads of each group,
    of which several devices may have a part. ``num_groups``: of all devices."""
    if not axes or lax.axis_size(axes) <= num_groups:
        return means
    parts = all_gather(means[..., 0], axes)  # [B, T, devices]: each has a part of one group
    whole = jnp.mean(parts.reshape(*parts.shape[:-1], num_groups, -1), axis=-1)
    group = lax.axis_index(axes) // (lax.axis_size(axes) // num_groups)
    return lax.dynamic_index_in_dim(whole, group, axis=-1)[..., None]
