"""DSpark's confidence head (arXiv 2607.05147)."""

import jax.numpy as jnp
from jax import Array

from jaxspec.models.heads.corrections import Markov
from jaxspec.models.tensors import TensorMap
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.products import einsum_f32


@pytree
class Confidence(Pytree):
    """How likely a drafted token is accepted if those before it are."""

    weight: Array = array("units", "features")  # [1, H], or [1, H + r]
    bias: Array = array("units")  # [1]

    def __call__(self, outputs: Array, markov: Markov | None, before: Array) -> Array:
        """Float32 logits [...] from the layers' normed outputs [..., H] and the tokens before the
        drafted ones, int32 [...]."""
        if self.weight.shape[1] > outputs.shape[-1]:
            assert markov is not None  # see BlockConfig
            outputs = jnp.concatenate([outputs, markov.before[before]], axis=-1)
        return einsum_f32("...f,uf->...u", outputs, self.weight)[..., 0] + self.bias[0]

    def mapped(self, tensor_map: TensorMap) -> "Confidence":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            weight=tensor_map.array("confidence_head.proj.weight", self.weight),
            bias=tensor_map.array("confidence_head.proj.bias", self.bias),
        )
