"""The MLP of Apertus: without a gate, with xIELU (arXiv 2411.13010)."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.mlps import XieluConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import AnyLinear, Linear, Product, linear_shape
from jaxspec.models.shapes import vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.models.wrapped_tensors import Scalar
from jaxspec.parallel import Shards, check_divides
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class Xielu(Pytree):
    """Weights of one layer's MLP. The numbers of its activation are float32 [1]."""

    up: Linear  # [H, F]
    down: Linear  # [F, H]
    alpha_p: Array = array("features")
    alpha_n: Array = array("features")
    beta: Array = array("features")
    eps: Array = array("features")
    config: XieluConfig = static()

    def __call__(self, x: Array, step: ForwardPass) -> Product:
        """From normed input [B, T, H] to the addend of the residual stream."""
        with jax.named_scope("mlp"):
            up = self.up.product(x, "mlp").result(step.layout, step.kernels)
            return self.down.product(self._activated(up), "mlp")

    @jax.named_scope("activation")
    def _activated(self, x: Array) -> Array:
        """[B, T, F]: above 0 a parabola, below a line and an exponential."""
        wide = x.astype(jnp.float32)
        above, below = jax.nn.softplus(self.alpha_p), self.beta + jax.nn.softplus(self.alpha_n)
        parabola = above * wide * wide
        bent = (jnp.expm1(jnp.minimum(wide, self.eps)) - wide) * below
        return (jnp.where(wide > 0, parabola, bent) + self.beta * wide).astype(x.dtype)

    @property
    def reader(self) -> AnyLinear | None:
        """The projection that alone reads the input, if there is one."""
        return self.up

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Xielu":
        """The same, with every array replaced by ``tensor_map``'s result for ``<prefix>mlp``."""
        module = f"{prefix}mlp."
        function = f"{module}act_fn"
        return self.replace(
            up=tensor_map.linear(self.up, One(f"{module}up_proj")),
            down=tensor_map.linear(self.down, One(f"{module}down_proj")),
            alpha_p=tensor_map.array(f"{function}.alpha_p", self.alpha_p),
            alpha_n=tensor_map.array(f"{function}.alpha_n", self.alpha_n),
            beta=tensor_map.of_source(Scalar(function), "beta", self.beta),
            eps=tensor_map.of_source(Scalar(function), "eps", self.eps),
        )


def xielu_shape(config: XieluConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards) -> Xielu:
    """A Xielu of ShapeDtypeStructs.

    Raises ValueError for a width that cannot be split evenly.
    """
    width = config.intermediate_size
    check_divides("intermediate_size", width, shards.of("ff"))
    number = vector(1, jnp.float32)
    return Xielu(
        up=linear_shape(("hidden", "ff"), (hidden_size, width), dtype),
        down=linear_shape(("ff", "hidden"), (width, hidden_size), dtype),
        alpha_p=number,
        alpha_n=number,
        beta=number,
        eps=number,
        config=config,
    )
