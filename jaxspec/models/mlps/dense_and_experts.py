"""A gated MLP and experts side by side, which read the residual stream by a norm each (Gemma 4).

The router has a norm of its own, too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.mlps import DenseAndExpertsConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Computed
from jaxspec.models.mlps.dense import Dense, dense_shape
from jaxspec.models.mlps.experts import Experts, Mixture, experts_shape
from jaxspec.models.mlps.routing import Routes
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import vector
from jaxspec.models.tensors import TensorMap
from jaxspec.parallel import Shards
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.chosen_products import ChosenProducts


@pytree
class DenseAndExperts(Pytree):
    """Weights of one layer's gated MLP and experts.

    Attributes:
      dense_norm, experts_norm: of what the gated MLP and the experts read.
      dense_out_norm, experts_out_norm: of what they give.
      router_scale: the norm of what the router reads has this weight, divided by sqrt(H).
      expert_scale: weights of the chosen experts are multiplied by theirs.
    """

    dense: Dense
    experts: Experts
    dense_norm: Array = array("hidden")
    dense_out_norm: Array = array("hidden")
    experts_norm: Array = array("whole_hidden")
    experts_out_norm: Array = array("hidden")
    router_scale: Array = array("whole_hidden")
    expert_scale: Array = array("routes")  # [E]
    config: DenseAndExpertsConfig = static()

    def __call__(self, x: Array, step: ForwardPass) -> Computed:
        """From the residual stream [B, T, H] to its addend."""
        dense = self.dense(step.norm(x, self.dense_norm), step)
        with jax.named_scope("mlp"):
            whole = self.experts.whole(x, step)
            rows = whole.reshape(-1, whole.shape[-1])
            normed = rms_norm(rows, self.experts_norm, step.eps)
            mixed = self.experts.mixed(normed, self._routes(rows, step), step)
            if isinstance(mixed, ChosenProducts):
                mixed = mixed.total().astype(x.dtype)
        mixture = Mixture(mixed.reshape(whole.shape), step.layout.axes("experts"), None, None)
        given = step.normed(x, dense, self.dense_out_norm)
        return Computed(given + step.normed(x, mixture, self.experts_out_norm))

    def _routes(self, rows: Array, step: ForwardPass) -> Routes:
        """The routes of rows [N, H] of the residual stream."""
        scale = self.router_scale * rows.shape[-1] ** -0.5
        routes = self.experts.routes(rms_norm(rows, scale, step.eps), step)
        return routes._replace(weights=routes.weights * self.expert_scale[routes.experts])

    reader = None  # several projections read the input

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "DenseAndExperts":
        """The same, with every array replaced by ``tensor_map``'s result."""

        def norm(name: str, weight: Array) -> Any:
            return tensor_map.norm(f"{prefix}{name}.weight", weight)

        names = self.config.experts.names
        block = f"{prefix}{names.block}."
        return self.replace(
            dense=self.dense.mapped(prefix, tensor_map),
            experts=self.experts.mapped(prefix, tensor_map),
            dense_norm=norm("pre_feedforward_layernorm", self.dense_norm),
            dense_out_norm=norm("post_feedforward_layernorm_1", self.dense_out_norm),
            experts_norm=norm("pre_feedforward_layernorm_2", self.experts_norm),
            experts_out_norm=norm("post_feedforward_layernorm_2", self.experts_out_norm),
            router_scale=tensor_map.array(f"{block}router.scale", self.router_scale),
            expert_scale=tensor_map.array(f"{block}router.per_expert_scale", self.expert_scale),
        )


def dense_and_experts_shape(
    config: DenseAndExpertsConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards
) -> DenseAndExperts:
    """A DenseAndExperts of ShapeDtypeStructs.

    Raises ValueError for widths or a number of experts that cannot be split evenly.
    """
    weight = vector(hidden_size, dtype)
    return DenseAndExperts(
        dense=dense_shape(config.dense, hidden_size, dtype, shards),
        experts=experts_shape(config.experts, hidden_size, dtype, shards),
        dense_norm=weight,
        dense_out_norm=weight,
        experts_norm=weight,
        experts_out_norm=weight,
        router_scale=weight,
        expert_scale=vector(config.experts.routing.num_experts, jnp.float32),
        config=config,
    )
