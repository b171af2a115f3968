"""MLPs: the part of a layer that works on each token separately. One file per kind."""

from typing import Protocol

import jax.numpy as jnp
from jax import Array

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mlps import DenseAndExpertsConfig, DenseConfig, MlpConfig, XieluConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, AnyLinear
from jaxspec.models.mlps.dense import Dense, dense_shape
from jaxspec.models.mlps.dense_and_experts import DenseAndExperts, dense_and_experts_shape
from jaxspec.models.mlps.experts import Experts, experts_shape
from jaxspec.models.mlps.xielu import Xielu, xielu_shape
from jaxspec.models.tensors import TensorMap
from jaxspec.parallel import ONE_SHARD, Shards

__all__ = ["Dense", "DenseAndExperts", "Experts", "Mlp", "Xielu", "mlp_shape"]


class Mlp(Protocol):
    """A frozen pytree of weights; ``config`` describes it."""

    def __call__(self, x: Array, step: ForwardPass) -> Addend:
        """From input [B, T, H] to the addend of the residual stream. The input is normed, unless
        the config says that the MLP has norms of its own."""
        ...

    @property
    def reader(self) -> AnyLinear | None:
        """The projection that alone reads the input, if there is one: it may get RoundedRows in
        place of an array (see models.linear). None: the input is an array."""
        ...

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Mlp":
        """The same, with every array replaced by ``tensor_map``'s result."""
        ...


def mlp_shape(
    config: MlpConfig,
    hidden_size: int,
    dtype: jnp.dtype,
    shards: Shards = ONE_SHARD,
) -> Mlp:
    """An MLP of ShapeDtypeStructs, of the kind that ``config`` describes.

    Raises ValueError for a config of unknown kind.
    """
    match config:
        case DenseConfig():
            return dense_shape(config, hidden_size, dtype, shards)
        case ExpertsConfig():
            return experts_shape(config, hidden_size, dtype, shards)
        case DenseAndExpertsConfig():
            return dense_and_experts_shape(config, hidden_size, dtype, shards)
        case XieluConfig():
            return xielu_shape(config, hidden_size, dtype, shards)
    raise ValueError(f"no MLP is described by {config!r}: add its kind to models/mlps")
