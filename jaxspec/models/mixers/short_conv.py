"""A short causal convolution between two gates, as in LFM2."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry
from jaxspec.cache.convolution import ConvolutionState, run_convolution
from jaxspec.config.recurrent import ShortConvConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import AnyLinear, Linear, Product, linear_shape
from jaxspec.models.mixers.rows import RowsOfPass, after_state, check_whole_sequences
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, Stacked, TensorMap
from jaxspec.models.wrapped_tensors import Depthwise, Fused
from jaxspec.parallel import Layout, Shards, check_divides
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class ShortConv(Pytree):
    """Weights of one layer: y = o(c * conv(b * x)), where b, c and x are projections of the input.

    Products of b and x, and the convolution, are float32: those of 16-bit numbers are exact, so a
    token's inputs are the same bits, whether they come from the pass or from the state.
    """

    bcx: Linear  # [in, 3, C]: b, c, x
    taps: Array = array("length", "channels")  # [K, C], the token's own last
    taps_bias: Array | None = array("channels")  # [C]
    o: Linear  # [C, H]
    config: ShortConvConfig = static()

    def __call__(
        self, x: Array, state: ConvolutionState | None, step: ForwardPass
    ) -> tuple[Product, ConvolutionState | None]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state.

        Raises ValueError for devices that share sequences.
        """
        check_whole_sequences(step.layout)
        bcx = self.bcx.product(x, "bcx").result(step.layout, step.kernels)
        with jax.named_scope("short_conv"):
            b, c, inputs = (bcx[..., part, :].astype(jnp.float32) for part in range(3))
            out, state = self._convolved(b * inputs, state, step)
            if self.taps_bias is not None:
                out = out + self.taps_bias.astype(jnp.float32)
            out = (c * out).astype(bcx.dtype)
        return self.o.product(out, "o"), state

    def _convolved(
        self, inputs: Array, state: ConvolutionState | None, step: ForwardPass
    ) -> tuple[Array, ConvolutionState | None]:
        """The convolution of inputs [B, T, C], float32 of the same shape, and the new state.
        Without a state the tokens are whole sequences, of which nothing is kept."""
        batch, size, channels = inputs.shape
        if state is None:
            before = jnp.zeros((batch, len(self.taps) - 1, channels), inputs.dtype)
            return run_convolution(before, inputs, self.taps), None
        rows, _, counts, ancestors, depth = RowsOfPass.of(step.attend, size)
        if ancestors is not None and depth is not None:
            return state.read_tree(rows, inputs, self.taps, ancestors, depth)
        return after_state(state.read_run(rows, counts, inputs, self.taps))

    @property
    def reader(self) -> AnyLinear | None:
        """The projection that alone reads the input."""
        return self.bcx

    def init_state(self, geometry: Geometry, layout: Layout) -> ConvolutionState:
        """Rows without tokens. Raises ValueError for a layout that splits sequences."""
        check_whole_sequences(layout)
        channels = self.bcx.out_shape[-1]
        return ConvolutionState.create(geometry, channels, self.config.taps, layout)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "ShortConv":
        """The same, with the map's result for ``<prefix>conv`` in place of every array."""
        module, channels = f"{prefix}conv.", self.bcx.out_shape[-1]
        parts = Stacked(("b", "c", "x"))
        return self.replace(
            bcx=tensor_map.linear(self.bcx, Fused(f"{module}in_proj", parts, (channels,) * 3)),
            taps=tensor_map.of_source(Depthwise(One(f"{module}conv")), "weight", self.taps),
            taps_bias=tensor_map.array(f"{module}conv.bias", self.taps_bias),
            o=tensor_map.linear(self.o, One(f"{module}out_proj")),
        )


def short_conv_shape(
    config: ShortConvConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards,
    *,
    input_size: int | None = None,
) -> ShortConv:
    """A ShortConv of ShapeDtypeStructs. ``input_size``: width of the first projection's input.

    Raises ValueError for channels that cannot be split evenly over devices.
    """
    check_divides("channels of convolutions", hidden_size, shards.of("channels"))
    bcx = (input_size or hidden_size), 3, hidden_size
    return ShortConv(
        bcx=linear_shape(("hidden", "group", "channels"), bcx, dtype, bias=config.bias),
        taps=array_shape(config.taps, hidden_size, dtype=dtype),
        taps_bias=array_shape(hidden_size, dtype=dtype, when=config.bias),
        o=linear_shape(("channels", "hidden"), (hidden_size,) * 2, dtype, bias=config.bias),
        config=config,
    )
