"""How the tensors of a checkpoint make up our arrays.

Checkpoints store a weight as [out, in], one tensor a projection; our Linear contracts its first
dimension and may hold several projections. A *source* names the tensors of one Linear and says how
they lie in it. From files they are read block by block: a Split is a function that, given a block
of one of our arrays (a NumPy array in our layout) and where in the whole array the block starts,
returns views into the block, each in the order of the tensor's rows that fill it. The same views
serve reading and writing, and a block may be any shard. Tensors that are on a device already are
joined there.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Piece(NamedTuple):
    """A view that holds consecutive rows of a checkpoint's tensor.

    ``view`` is [rows, columns], its rows possibly over several axes; for a vector (``column`` is
    None) it is [rows]. ``row`` and ``column``: where in the tensor it starts. ``inputs_first``: the
    tensor itself is [columns, rows].
    """

    name: str
    view: np.ndarray
    row: int
    column: int | None
    inputs_first: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of the axes that the rows lie over."""
        return self.view.shape if self.column is None else self.view.shape[:-1]

    def of_tensor(self, rows: slice) -> tuple[slice, ...]:
        """The tensor's part that holds some of its rows, and the piece's columns."""
        if self.column is None:
            return (rows,)
        columns = slice(self.column, self.column + self.view.shape[-1])
        return (columns, rows) if self.inputs_first else (rows, columns)


Split = Callable[[np.ndarray, tuple[int, ...]], list[Piece]]
Tensors = Mapping[str, Array]


class Source(Protocol):
    """The checkpoint tensors of one Linear: ``<name>.<kind>``, [out, in] or [out].

    Kinds are ``weight`` and ``bias``, and whatever another kind of Linear is made of: its array
    has the weight's axes ([in, *out], one of them shorter where values are packed or share a scale)
    or the bias's.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint's projections that it is made of."""
        ...

    def split(self, kind: str) -> Split:
        """The Split of the array of one kind."""
        ...

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        """Our array of ``shape`` from whole tensors on a device."""
        ...


def same(name: str, num_rows: int | None = None) -> Split:
    """An array in the tensor's own layout. Rows past ``num_rows`` are padding of ours."""

    def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
        view = block if num_rows is None else block[: max(0, num_rows - start[0])]
        return [Piece(name, view, start[0], start[1] if block.ndim > 1 else None)]

    return split


@dataclasses.dataclass(frozen=True)
class One:
    """A single projection. Outputs past ``num_rows`` are padding of ours."""

    name: str
    num_rows: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        own = same(f"{self.name}.{kind}", self.num_rows)

        def transposed(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return own(block.T, start[::-1])

        return transposed

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        tensor = tensors[f"{self.name}.{kind}"].T
        padding = [(0, ours - theirs) for ours, theirs in zip(shape, tensor.shape, strict=True)]
        return jnp.pad(tensor, padding)


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Projections of equal size side by side: [in, n, out], biases [n, out]."""

    names: tuple[str, ...]

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            rows, column = _rows_first(block, start, row_axes=2)
            return [
                Piece(f"{name}.{kind}", rows[i], start[-1], column)
                for i, name in enumerate(self.names)
            ]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        return jnp.stack([tensors[f"{name}.{kind}"].T for name in self.names], axis=-2)


@dataclasses.dataclass(frozen=True)
class GroupedHeads:
    """Query, key and value projections grouped by KV head: [in, G, R, D], biases [G, R, D].

    R = Q / G + 2: a group's query heads, then its key, then its value. ``repeats``: how many
    neighbouring groups share one of the checkpoint's KV heads.
    """

    query: str
    key: str
    value: str
    repeats: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return (self.query, self.key, self.value)

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            rows, column = _rows_first(block, start, row_axes=3)
            groups, per_group, head_dim = rows.shape[:3]
            first = start[-3]
            queries = Piece(
                f"{self.query}.{kind}", rows[:, :-2], first * (per_group - 2) * head_dim, column
            )
            step = groups if self.repeats == 1 else 1
            return [queries] + [
                Piece(
                    f"{name}.{kind}",
                    rows[i : i + step, member],
                    (first + i) // self.repeats * head_dim,
                    column,
                )
                for name, member in ((self.key, -2), (self.value, -1))
                for i in range(0, groups, step)
            ]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        groups, per_group, head_dim = shape[-3:]

        def heads(name: str, members: int) -> Array:
            own = tensors[f"{name}.{kind}"].T
            own = own.reshape(*own.shape[:-1], -1, members, head_dim)
            return jnp.repeat(own, groups // own.shape[-3], axis=-3)

        queries = heads(self.query, per_group - 2)
        return jnp.concatenate([queries, heads(self.key, 1), heads(self.value, 1)], axis=-2)


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
        turned = {f"{name}.{kind}": tensors[f"{name}.{kind}"].T for name in self.names}
        return self.source.join(kind, turned, shape)


def _rows_first(
    block: np.ndarray, start: tuple[int, ...], row_axes: int
) -> tuple[np.ndarray, int | None]:
    """The block with its input axis, if it has one, last; and that axis's start."""
    if block.ndim == row_axes:
        return block, None
    return np.moveaxis(block, 0, -1), start[0]


def tensor_shapes(leaves: Iterable[tuple[Any, Split]]) -> dict[str, jax.ShapeDtypeStruct]:
    """The checkpoint's tensors behind (array or shape, Split) pairs, with the arrays' dtypes."""
    ends: dict[str, int] = {}
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf, split in leaves:
        whole = np.broadcast_to(np.zeros((), bool), leaf.shape)
        for piece in split(whole, (0,) * len(leaf.shape)):
            end = max(piece.row + math.prod(piece.row_shape), ends.get(piece.name, 0))
            ends[piece.name] = end
            shape = tuple(part.stop for part in piece.of_tensor(slice(0, end)))
            shapes[piece.name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    return shapes


@dataclasses.dataclass(frozen=True)
class Filler:
    """How a tree of weights is filled: from its tensors' names to a tree of something for each.

    Every part of a model has a method ``filled``, which names the tensors that it is made of and
    returns the part with the filler's result in place of every array (a Split, or an array joined
    on a device), or of every Linear (another kind of it).
    """

    vector: Callable[[str, Any], Any]  # (name, array or shape): an array in the tensor's own layout
    part: Callable[[Source, str, Any], Any]  # (source, kind, array or shape)
    whole: Callable[[Any, Source], Any] | None = None  # (Linear, source): instead of its arrays

    def array(self, name: str, own: Any) -> Any:
        """What stands for an array ``own`` in the tensor's own layout; None where it is None."""
        return None if own is None else self.vector(name, own)

    def linear(self, own: Any, source: Source) -> Any:
        """What stands for a Linear, of whatever kind; None where it is None."""
        if own is None:
            return None
        return own.filled(source, self) if self.whole is None else self.whole(own, source)

    def of_source(self, source: Source, kind: str, own: Any) -> Any:
        return None if own is None else self.part(source, kind, own)


def splitting(num_rows: int | None = None) -> Filler:
    """Puts a Split in the place of each array. Rows past ``num_rows`` of a table are padding."""

    def vector(name: str, own: Any) -> Split:
        return same(name, num_rows if len(own.shape) > 1 else None)

    def part(source: Source, kind: str, own: Any) -> Split:
        return source.split(kind)

    return Filler(vector, part)


def choosing(kind: Callable[[Any, Source], Any]) -> Filler:
    """Puts ``kind(linear, source)`` in the place of each Linear, and leaves all else as it is: for
    shapes, where the checkpoint decides which projections are quantized."""

    def part(source: Source, name: str, own: Any) -> Any:
        return own

    return Filler(lambda name, own: own, part, kind)


def joining(tensors: Tensors) -> Filler:
    """Puts an array, joined on the device from whole tensors, in the place of each array."""

    def vector(name: str, own: Any) -> Array:
        padding = [(0, o - t) for o, t in zip(own.shape, tensors[name].shape, strict=True)]
        return jnp.pad(tensors[name], padding).astype(own.dtype)

    def part(source: Source, kind: str, own: Any) -> Array:
        return source.join(kind, tensors, own.shape).astype(own.dtype)

    return Filler(vector, part)
