"""Sources that change the layout of another source's tensors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.tensors import Piece, Source, Split, Tensors


@dataclasses.dataclass(frozen=True)
class Fused:
    """The tensors of another source as consecutive rows of one tensor.

    ``rows``: of each tensor, in the order of the source's names.
    """

    name: str
    source: Source
    rows: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        own, name = self.source.split(kind), f"{self.name}.{kind}"
        first = {part: rows.start for part, rows in self._places(kind).items()}

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            pieces = own(block, start)
            return [one._replace(name=name, row=one.row + first[one.name]) for one in pieces]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        whole = tensors[f"{self.name}.{kind}"]
        parts = {part: whole[rows] for part, rows in self._places(kind).items()}
        return self.source.join(kind, parts, shape)

    def _places(self, kind: str) -> dict[str, slice]:
        """The rows of each tensor of the source."""
        ends = np.cumsum(self.rows).tolist()
        sized = zip(self.source.names, self.rows, ends, strict=True)
        return {f"{name}.{kind}": slice(end - size, end) for name, size, end in sized}


@dataclasses.dataclass(frozen=True)
class InputsFirst:
    """The tensors of another source, stored as [in, out]."""

    source: Source

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    def split(self, kind: str) -> Split:
        own = self.source.split(kind)

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return [piece._replace(inputs_first=True) for piece in own(block, start)]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        transposed = {f"{name}.{kind}": tensors[f"{name}.{kind}"].T for name in self.names}
        return self.source.join(kind, transposed, shape)


@dataclasses.dataclass(frozen=True)
class OutputsFirst:
    """The tensors of another source, for arrays that hold the input last: [*out, in]."""

    source: Source

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    def split(self, kind: str) -> Split:
        own = self.source.split(kind)

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return own(np.moveaxis(block, -1, 0), (start[-1], *start[:-1]))

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        return jnp.moveaxis(self.source.join(kind, tensors, (shape[-1], *shape[:-1])), 0, -1)
