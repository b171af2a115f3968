"""EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858).

``fc`` combines the target's last hidden state with the token's embedding. The heads share the
target's LM head.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.heads.config import HeadConfig
from jaxspec.models.heads.head import FrontOutput, FrontShape
from jaxspec.models.layer import Layer
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.pytree import Pytree, pytree
from pallas_kernels.selection import Kernels


@pytree
class Eagle1Front(Pytree):
    """The first layer reads ``fc`` [2 * H, H] of embedding and hidden state, without a norm."""

    fc: Linear

    method, norm_name, lm_head_name = "eagle1", "norm.weight", "lm_head"

    def hidden(self, captured: Array, eps: float, kernels: Kernels) -> Array:
        """The captured state is the hidden state."""
        return captured

    def __call__(
        self, embedded: Array, hidden: Array, first: Layer, step: ForwardPass
    ) -> FrontOutput:
        with jax.named_scope("fc"):
            x = self.fc(jnp.concatenate([embedded, hidden], axis=-1), step.kernels)
        return FrontOutput(x, step.norm(x, first.input_norm))

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Eagle1Front":
        return self.replace(fc=tensor_map.linear(self.fc, One("fc")))


def eagle1_front_shape(head: HeadConfig, dtype: jnp.dtype) -> FrontShape:
    """A front of ShapeDtypeStructs."""
    hidden = head.model.hidden_size
    fc = linear_shape(("features", "hidden"), (2 * hidden, hidden), dtype, bias=head.fc_bias)
    front = Eagle1Front(fc=fc)
    return FrontShape(
        front, mixer_input_size=hidden, norms_input=False, has_norm=False, has_lm_head=False
    )
