"""Arrays of three and more dimensions that are laid out as in the checkpoint."""

import dataclasses
from typing import Any

from jax import Array

from jaxspec.models.tensors import Piece, Split, TensorMap, Tensors


def shaped(tensor_map: TensorMap, name: str, leaf: Any) -> Any:
    """The map's result for an array with all dimensions of the tensor ``name``, whole on every
    device."""
    return tensor_map.of_source(_Shaped(name), "weight", leaf)


@dataclasses.dataclass(frozen=True)
class _Shaped:
    """An array, whole on every device, with all dimensions of the tensor ``name``."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        return lambda block, start: [Piece(self.name, block, 0, None, shaped=True)]

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        return tensors[self.name]
