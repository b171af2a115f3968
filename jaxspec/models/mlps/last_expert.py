"""The shared expert as the last of a layer's experts, stored in another way than these."""

import jax.numpy as jnp
from jax import Array

from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.mlps.expert_linear import AnyExpertLinear
from jaxspec.models.mlps.mix import LocalExperts, mix
from jaxspec.models.mlps.routing import Routes
from jaxspec.parallel.pytree import Pytree, pytree
from pallas_kernels.chosen_products import ChosenProducts


@pytree
class LastExpert(Pytree):
    """Weights of one expert; all rows choose it. Its activation is SwiGLU."""

    gate_up: AnyExpertLinear  # [1, H, 2, F]
    down: AnyExpertLinear  # [1, F, H]

    def added(
        self, rows: Array, weights: Array, others: Array | ChosenProducts, step: ForwardPass
    ) -> Array:
        """What it makes of rows [N, H], times weights [N, 1], and what others add to them."""
        local = LocalExperts(gate_up=self.gate_up, down=self.down, first=0, activation=None)
        mixed = mix(local, rows, Routes(jnp.zeros(weights.shape, jnp.int32), weights), 1, step)
        return (_total(others) + _total(mixed)).astype(rows.dtype)


def _total(mixed: Array | ChosenProducts) -> Array:
    return mixed.total() if isinstance(mixed, ChosenProducts) else mixed.astype(jnp.float32)
