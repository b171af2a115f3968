"""The MLP of dense model families: with a gate, or without one."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.experts import SquaredRelu
from jaxspec.config.mlps import DenseConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import AnyLinear, Linear, Product, linear_shape
from jaxspec.models.tensors import One, Source, Stacked, TensorMap
from jaxspec.models.wrapped_tensors import Fused, scaled
from jaxspec.parallel import Shards, check_divides
from jaxspec.parallel.pytree import Pytree, pytree, static


@pytree
class Dense(Pytree):
    """Weights of one layer's MLP: stacked gate and up projections, and the down projection. Without
    a gate the up projection is alone."""

    gate_up: Linear  # [H, 2, F], or [H, 1, F]
    down: Linear  # [F, H]
    config: DenseConfig = static()

    def __call__(self, x: Array, step: ForwardPass) -> Product:
        """From normed input [B, T, H] to the addend of the residual stream."""
        with jax.named_scope("mlp"):
            gate_up = self.gate_up.product(x, "mlp").result(step.layout, step.kernels)
            units = step.gated(gate_up, self.config.activation, self.down)
            return self.down.product(units, "mlp")

    @property
    def reader(self) -> AnyLinear | None:
        """The projection that alone reads the input, if there is one."""
        return self.gate_up

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Dense":
        """The same, with every array replaced by ``tensor_map``'s result for ``<prefix>mlp``."""
        return self.mapped_at(f"{prefix}mlp.", tensor_map)

    def mapped_at(self, prefix: str, tensor_map: TensorMap) -> "Dense":
        """``mapped`` where the names of the projections begin with ``prefix``."""
        config = self.config
        source: Source = Stacked((f"{prefix}up_proj",))
        if not isinstance(config.activation, SquaredRelu):
            stacked = Stacked((f"{prefix}gate_proj", f"{prefix}up_proj"))
            source = scaled(stacked, config.gate_multiplier, 1.0)
        if config.fused:
            source = Fused(f"{prefix}gate_up_proj", source, (config.intermediate_size,) * 2)
        return self.replace(
            gate_up=tensor_map.linear(self.gate_up, source),
            down=tensor_map.linear(
                self.down, scaled(One(f"{prefix}down_proj"), config.down_multiplier)
            ),
        )


def dense_shape(config: DenseConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards) -> Dense:
    """A Dense of ShapeDtypeStructs.

    Raises ValueError for a width that cannot be split evenly.
    """
    width, count = config.intermediate_size, 1 if isinstance(config.activation, SquaredRelu) else 2
    check_divides("intermediate_size", width, shards.of("ff"))
    return Dense(
        gate_up=linear_shape(
            ("hidden", "two", "ff"), (hidden_size, count, width), dtype, bias=config.bias
        ),
        down=linear_shape(("ff", "hidden"), (width, hidden_size), dtype, bias=config.bias),
        config=config,
    )
