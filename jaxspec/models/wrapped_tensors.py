"""Further sources: groups of outputs, single numbers, and those that change another's layout."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.models.tensors import Piece, Source, Split, Tensors


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of a projection: for each group ``width`` consecutive ones, from row ``first`` on.

    ``repeats``: number of neighbouring groups that have the same rows. ``factor``: they are
    multiplied by it.
    """

    name: str
    width: int
    first: int = 0
    repeats: int = 1
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Parts of projections, side by side in each group: [in, G, sum of widths], biases [G, ...]."""

    parts: tuple[Part, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.name for part in self.parts))

    def split(self, kind: str) -> Split:
        ends = list(itertools.accumulate(part.width for part in self.parts))

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            rows, column = block, None
            if block.ndim > 2:
                rows, column = np.moveaxis(block, 0, -1), start[0]
            groups, pieces = len(rows), list[Piece]()
            for part, end in zip(self.parts, ends, strict=True):
                name, view = f"{part.name}.{kind}", rows[:, end - part.width : end]
                step = groups if part.repeats == 1 else 1
                for group in range(0, groups, step):
                    row = part.first + (start[-2] + group) // part.repeats * part.width
                    piece = Piece(name, view[group : group + step], row, column)
                    pieces.append(_times(piece, part.factor, kind))
            return pieces

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        def rows_of(part: Part) -> Array:
            groups = shape[-2] // part.repeats
            last = part.first + groups * part.width
            rows = tensors[f"{part.name}.{kind}"][part.first : last].T
            rows = rows.reshape(*shape[:-2], groups, part.width)
            return jnp.repeat(_times_joined(rows, part.factor), part.repeats, axis=-2)

        return jnp.concatenate([rows_of(part) for part in self.parts], axis=-1)


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Numbers without dimensions, ``<name>.<kind>``, each as an array [1]."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return [Piece(f"{self.name}.{kind}", block, 0, None, scalar=True)]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        return tensors[f"{self.name}.{kind}"].reshape(shape)


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """The tensors of another source, in another layout."""

    source: Source

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names


@dataclasses.dataclass(frozen=True)
class Scaled(Wrapped):
    """Each tensor of the other source times a number, in the order of its names."""

    factors: tuple[float, ...]

    def split(self, kind: str) -> Split:
        inner, factors = self.source.split(kind), self._by_tensor(kind)

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return [_times(piece, factors[piece.name], kind) for piece in inner(block, start)]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        factors = self._by_tensor(kind)
        scaled = {name: _times_joined(tensors[name], factor) for name, factor in factors.items()}
        return self.source.join(kind, scaled, shape)

    def _by_tensor(self, kind: str) -> dict[str, float]:
        names = (f"{name}.{kind}" for name in self.names)
        return dict(zip(names, self.factors, strict=True))


def scaled(source: Source, *factors: float) -> Source:
    """The source, or Scaled for factors other than 1."""
    return source if set(factors) == {1} else Scaled(source, factors)


def multiplies(source: Source) -> bool:
    """Whether a source multiplies tensors by numbers."""
    match source:
        case Scaled():
            return True
        case Grouped(parts):
            return any(part.factor != 1 for part in parts)
        case Wrapped(inner) | Fused(source=inner):
            return multiplies(inner)
        case _:
            return False


def _times(piece: Piece, factor: float, kind: str) -> Piece:
    """Raises ValueError for tensors of packed numbers, whose values are not multiplied."""
    if factor == 1:
        return piece
    if kind not in ("weight", "bias"):
        raise ValueError(
            f"{piece.name} is quantized, and the config has multipliers of its projection, which "
            "are read for unquantized checkpoints only: take the original checkpoint"
        )
    return piece._replace(factor=factor)


def _times_joined(tensor: Array, factor: float) -> Array:
    """The product in float32, rounded once."""
    return tensor if factor == 1 else (tensor.astype(jnp.float32) * factor).astype(tensor.dtype)


class Depthwise(Wrapped):
    """Stored as those of a depthwise convolution: [out, 1, in]."""

    def split(self, kind: str) -> Split:
        inner = self.source.split(kind)

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return [piece._replace(depthwise=True) for piece in inner(block, start)]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        flat = {f"{name}.{kind}": tensors[f"{name}.{kind}"][:, 0] for name in self.names}
        return self.source.join(kind, flat, shape)


class OfHeads(Wrapped):
    """Vectors, stored as [1, 1, out, 1]."""

    def split(self, kind: str) -> Split:
        inner = self.source.split(kind)

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return [piece._replace(of_heads=True) for piece in inner(block, start)]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        flat = {f"{name}.{kind}": tensors[f"{name}.{kind}"].reshape(-1) for name in self.names}
        return self.source.join(kind, flat, shape)


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
        inner, name = self.source.split(kind), f"{self.name}.{kind}"
        first = {part: rows.start for part, rows in self._places(kind).items()}

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            pieces = inner(block, start)
            return [
                piece._replace(name=name, row=piece.row + first[piece.name]) for piece in pieces
            ]

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


class OutputsFirst(Wrapped):
    """For arrays that hold the input last: [*out, in]."""

    def split(self, kind: str) -> Split:
        inner = self.source.split(kind)

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return inner(np.moveaxis(block, -1, 0), (start[-1], *start[:-1]))

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        return jnp.moveaxis(self.source.join(kind, tensors, (shape[-1], *shape[:-1])), 0, -1)
