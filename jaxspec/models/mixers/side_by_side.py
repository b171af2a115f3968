"""Two mixers side by side, which read the same input, as in Falcon-H1."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry
from jaxspec.cache.side_by_side import SideBySideState
from jaxspec.config.mixers import SideBySideConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, takes_none
from jaxspec.models.tensors import TensorMap
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import Pytree, pytree, static
from pallas_kernels.selection import Kernels


@pytree
class SideBySide(Pytree):
    """Weights of one layer: those of two mixers, of any kinds. Their outputs are added."""

    first: Any
    second: Any
    config: SideBySideConfig = static()

    def __call__(
        self, x: Array, state: SideBySideState | None, step: ForwardPass
    ) -> tuple["Sum", SideBySideState | None]:
        """From normed input [B, T, in] and the layer's state to the addend of the residual stream
        and the new state."""
        states = (None, None) if state is None else (state.first, state.second)
        first, first_state = self.first(x, states[0], step)
        second, second_state = self.second(x, states[1], step)
        if state is not None:
            state = SideBySideState(first=first_state, second=second_state)
        return Sum(first, second), state

    reader = None  # several projections read the input

    def init_state(self, geometry: Geometry, layout: Layout) -> SideBySideState:
        """The empty states of both."""
        return SideBySideState(
            first=self.first.init_state(geometry, layout),
            second=self.second.init_state(geometry, layout),
        )

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "SideBySide":
        """The same, with every array replaced by ``tensor_map``'s result. Each mixer has names of
        its kind."""
        return self.replace(
            first=self.first.mapped(prefix, tensor_map),
            second=self.second.mapped(prefix, tensor_map),
        )


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum of two Addends (see models.linear.Addend)."""

    first: Addend
    second: Addend

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        """The sum, as one partial sum: [1, B, T, H]."""
        return self.first.partial_sums(layout, kernels, takes_none) + self.second.partial_sums(
            layout, kernels, takes_none
        )
