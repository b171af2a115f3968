"""The same linear projection of every expert, as one weight.

It is no Linear: its product depends on which expert each row goes through (see models/mlps/mix.py).
Quantized formats of Linear do not take its place, and whoever quantizes refuses it. Formats of
experts that are read quantized are classes with the same methods, see AnyExpertLinear.
"""

import dataclasses
from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.nodes import nodes_of
from jaxspec.models.tensors import Source, Split, TensorMap, Tensors
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.packed_experts import PackedExperts


class AnyExpertLinear(Pytree):
    """The weights of one projection of every expert, in any format.

    A subclass has the fields ``bias`` [E, *out] or None, and ``axes``: logical names of the
    weight's dimensions, which are experts, the input, the output.
    """

    bias: Array | None
    axes: tuple[str, ...]

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype of activations."""

    @property
    @abstractmethod
    def num_experts(self) -> int:
        """Experts of this device (inside shard_map: of its shard)."""

    @property
    @abstractmethod
    def in_memory(self) -> Array | None:
        """[E, in, *out] in the activations' dtype, if memory holds it as that; else only ``of``
        makes such weights, of few experts at a time."""

    @property
    def packed(self) -> PackedExperts | None:
        """The weights as the kernel packed_expert_product reads them, if memory holds that."""
        return None

    @abstractmethod
    def of(self, index: Array) -> Array:
        """Weights [..., in, *out] in the activations' dtype of the experts that ``index`` int [...]
        chooses. They are gathered before they are widened."""

    @abstractmethod
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """The logical axes of each array, for partition specs."""

    @abstractmethod
    def mapped(self, source: Source, tensor_map: TensorMap) -> "AnyExpertLinear":
        """The same, with every array replaced by ``tensor_map``'s result for ``source``."""


@pytree
class ExpertLinear(AnyExpertLinear):
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
        return self.weight.shape[0]

    @property
    def in_memory(self) -> Array:
        return self.weight

    def of(self, index: Array) -> Array:
        return self.weight[index]

    def mapped(self, source: Source, tensor_map: TensorMap) -> "ExpertLinear":
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
    """Raise ValueError for weights with experts; ``what`` is what they cannot do."""
    if nodes_of(weights, AnyExpertLinear):
        raise ValueError(f"experts cannot be {what}: leave it out for a model with experts")
