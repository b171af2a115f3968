"""The same linear projection of every expert, as one weight.

It is no Linear: its product depends on which expert each row goes through (see models/mlps/mix.py).
Quantized formats of Linear do not take its place; whoever quantizes refuses it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.nodes import nodes_of
from jaxspec.models.tensors import Source, Split, TensorMap, Tensors
from jaxspec.parallel.pytree import Pytree, array, pytree, static


@pytree
class ExpertLinear(Pytree):
    """y = x W[e] + b[e] for each expert e.

    ``axes``: logical names of the weight's dimensions: experts, the input, the output.
    """

    weight: Array = array()  # [E, in, *out]
    bias: Array | None = array(default=None)  # [E, *out]
    axes: tuple[str, ...] = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": self.axes, "bias": (self.axes[0], *self.axes[2:])}

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype

    @property
    def num_experts(self) -> int:
        """Experts of this device (inside shard_map: of its shard)."""
        return self.weight.shape[0]

    def mapped(self, source: Source, tensor_map: TensorMap) -> "ExpertLinear":
        """The same, with every array replaced by ``tensor_map``'s result for ``source``."""
        return self.replace(
            weight=tensor_map.of_source(source, "weight", self.weight),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )


@dataclasses.dataclass(frozen=True)
class PerExpert:
    """The tensors of the same projection of each expert: [E, in, *out], biases [E, *out]."""

    experts: tuple[Source, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for expert in self.experts for name in expert.names)

    def split(self, kind: str) -> Split:
        def split(block: Any, start: tuple[int, ...]) -> list[Any]:
            experts = self.experts[start[0] : start[0] + len(block)]
            pairs = zip(experts, block, strict=True)
            return [
                piece for source, part in pairs for piece in source.split(kind)(part, start[1:])
            ]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        return jnp.stack([source.join(kind, tensors, shape[1:]) for source in self.experts])


def expert_linear_shape(
    axes: tuple[str, ...], sizes: tuple[int, ...], dtype: jnp.dtype, *, bias: bool = False
) -> ExpertLinear:
    """An ExpertLinear of ShapeDtypeStructs; ``axes`` and ``sizes`` are of experts, the input, then
    the output."""

    def shape(dims: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    bias_shape = shape((sizes[0], *sizes[2:])) if bias else None
    return ExpertLinear(weight=shape(sizes), bias=bias_shape, axes=axes)


def check_no_experts(weights: Any, what: str) -> None:
    """Raise ValueError for weights with an ExpertLinear; ``what`` is what they cannot do."""
    if nodes_of(weights, ExpertLinear):
        raise ValueError(f"experts cannot be {what}: leave it out for a model with experts")
