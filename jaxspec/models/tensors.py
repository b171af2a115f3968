"""How our arrays are assembled from the tensors of a checkpoint.

Checkpoints store a weight as [out, in], one tensor per projection. Our Linear contracts its first
dimension and may hold several projections. A *source* names the checkpoint tensors of one Linear
and describes their layout in it.

From files, tensors are read block by block, where a block may be any shard of an array. A Split is
a function from a block (a NumPy array in our layout) and its start in the whole array to views into
the block. Each view holds consecutive rows of one tensor, in the tensor's order. The same views
serve reading and writing. Tensors that are already on a device are joined there.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Piece(NamedTuple):
    """A view that holds consecutive rows of a checkpoint tensor.

    Attributes:
      view: [rows, columns], where rows may be several axes; [rows] for a vector.
      row, column: start of the view in the tensor; ``column`` is None for a vector.
      inputs_first: the tensor itself is stored as [columns, rows].
      offset: what the view has more than the tensor, in every entry.
      factor: what the view is a multiple of the tensor by, in every entry; without an offset.
      depthwise: the tensor itself is stored as [rows, 1, columns].
      scalar: the tensor itself has no dimensions, and the view one entry.
      of_heads: the tensor itself is stored as [1, 1, rows, 1].
      shaped: the tensor itself has the dimensions of the view; rows are all of its entries.
    """

    name: str
    view: np.ndarray
    row: int
    column: int | None
    inputs_first: bool = False
    offset: int = 0
    factor: float = 1.0
    depthwise: bool = False
    scalar: bool = False
    of_heads: bool = False
    shaped: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of the axes that are rows."""
        return self.view.shape if self.column is None else self.view.shape[:-1]

    def of_tensor(self, rows: slice) -> tuple[slice, ...]:
        """Index of ``rows`` and the piece's columns in the tensor."""
        if self.scalar:
            return ()
        if self.of_heads:
            return slice(0, 1), slice(0, 1), rows, slice(0, 1)
        if self.shaped:
            _, *inner = self.view.shape
            first, last = (end // math.prod(inner) for end in (rows.start, rows.stop))
            return slice(first, last), *(slice(0, size) for size in inner)
        if self.column is None:
            return (rows,)
        columns = slice(self.column, self.column + self.view.shape[-1])
        if self.depthwise:
            return (rows, slice(0, 1), columns)
        return (columns, rows) if self.inputs_first else (rows, columns)


Split = Callable[[np.ndarray, tuple[int, ...]], list[Piece]]
Tensors = Mapping[str, Array]


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint, as it is stored or computed from others while it is read."""

    @property
    def file(self) -> Path: ...

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The name that safetensors has for it; I4 for signed integers of 4 bits."""
        ...

    def read(self, *index: slice) -> np.ndarray:
        """The slice at ``index``, of as many dimensions; everything without one."""
        ...


class Source(Protocol):
    """The checkpoint tensors of one Linear: ``<name>.<kind>``, [out, in] or [out].

    Kinds are ``weight`` and ``bias``. Quantized formats may have more, such as scales. Those arrays
    have the axes of the weight ([in, *out], one of them shorter if values are packed or share a
    scale) or of the bias.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the checkpoint's projections."""
        ...

    def split(self, kind: str) -> Split:
        """The Split of our array of one kind."""
        ...

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        """Our array of ``shape`` from whole tensors on a device."""
        ...


def same(name: str, num_rows: int | None = None, offset: int = 0) -> Split:
    """The Split of an array with the tensor's layout. Rows past ``num_rows`` are our padding.

    ``offset``: what the array has more than the tensor, in every entry.
    """

    def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
        view = block if num_rows is None else block[: max(0, num_rows - start[0])]
        column = start[1] if block.ndim > 1 else None
        return [Piece(name, view, start[0], column, offset=offset)]

    return split


@dataclasses.dataclass(frozen=True)
class One:
    """A single projection. Outputs past ``num_rows`` are our padding."""

    name: str
    num_rows: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        untransposed = same(f"{self.name}.{kind}", self.num_rows)

        def transposed(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return untransposed(block.T, start[::-1])

        return transposed

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        tensor = tensors[f"{self.name}.{kind}"].T
        padding = [(0, ours - theirs) for ours, theirs in zip(shape, tensor.shape, strict=True)]
        return jnp.pad(tensor, padding)


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Several projections of equal size, stacked: [in, n, out], biases [n, out]."""

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

    R = Q / G + 2: the query heads of a KV head, then its key, then its value. ``value`` None: there
    are no values, and R is Q / G + 1. ``repeats``: number of neighbouring groups that share one of
    the checkpoint's KV heads. ``pairs``: the checkpoint rotates entries 2 i and 2 i + 1 of a head
    together, which are ours i and i + D / 2; so it has the entries of queries and keys by turns.
    """

    query: str
    key: str
    value: str | None
    repeats: int = 1
    pairs: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.query, *self._shared)

    @property
    def _shared(self) -> tuple[str, ...]:
        """What a KV head has one of, in the order in which it comes after the queries."""
        return (self.key,) if self.value is None else (self.key, self.value)

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            rows, column = _rows_first(block, start, row_axes=3)
            groups, per_group, head_dim = rows.shape[:3]
            first, heads = start[-3], per_group - len(self._shared)
            queries = Piece(
                f"{self.query}.{kind}",
                self._ordered(self.query, rows[:, :heads], 2),
                first * heads * head_dim,
                column,
            )
            step = groups if self.repeats == 1 else 1
            return [queries] + [
                Piece(
                    f"{name}.{kind}",
                    self._ordered(name, rows[i : i + step, member], 1),
                    (first + i) // self.repeats * head_dim,
                    column,
                )
                for member, name in enumerate(self._shared, start=heads)
                for i in range(0, groups, step)
            ]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        groups, per_group, head_dim = shape[-3:]

        def heads(name: str, members: int) -> Array:
            weight = tensors[f"{name}.{kind}"].T
            if self._by_turns(name):
                halves = weight.reshape(*weight.shape[:-1], -1, head_dim // 2, 2)
                weight = jnp.swapaxes(halves, -1, -2)
            weight = weight.reshape(*weight.shape[: len(shape) - 3], -1, members, head_dim)
            repeats = groups // weight.shape[-3]
            return weight if repeats == 1 else jnp.repeat(weight, repeats, axis=-3)

        queries = heads(self.query, per_group - len(self._shared))
        return jnp.concatenate([queries, *(heads(name, 1) for name in self._shared)], axis=-2)

    def _by_turns(self, name: str) -> bool:
        return self.pairs and name != self.value

    def _ordered(self, name: str, view: np.ndarray, axis: int) -> np.ndarray:
        """The view with the entries of heads, which are ``axis``, as the checkpoint has them."""
        if not self._by_turns(name):
            return view
        before, (size, *after) = view.shape[:axis], view.shape[axis:]
        return np.swapaxes(view.reshape(*before, 2, size // 2, *after), axis, axis + 1)


@dataclasses.dataclass(frozen=True)
class HeadPart:
    """The first or the last outputs of every head of one projection, whose heads have ``size``
    outputs: [in, Q, D], biases [Q, D].
    """

    name: str
    size: int
    last: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, kind: str) -> Split:
        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            rows, column = _rows_first(block, start, row_axes=2)
            first = self._first(rows.shape[1])
            return [
                Piece(f"{self.name}.{kind}", head, (start[-2] + i) * self.size + first, column)
                for i, head in enumerate(rows)
            ]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        heads, part = shape[-2:]
        first, weight = self._first(part), tensors[f"{self.name}.{kind}"].T
        return weight.reshape(*weight.shape[:-1], heads, self.size)[..., first : first + part]

    def _first(self, part: int) -> int:
        """Where a part of so many outputs begins in a head."""
        return self.size - part if self.last else 0


def _rows_first(
    block: np.ndarray, start: tuple[int, ...], row_axes: int
) -> tuple[np.ndarray, int | None]:
    """The block with its input axis (if any) moved last, and the start of that axis."""
    if block.ndim == row_axes:
        return block, None
    return np.moveaxis(block, 0, -1), start[0]


def tensor_shapes(leaves: Iterable[tuple[Any, Split]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the checkpoint tensors of (array or shape, Split) pairs; dtypes are the arrays'."""
    ends: dict[str, int] = {}
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf, split in leaves:
        whole = np.broadcast_to(np.zeros((), bool), leaf.shape)
        for piece in split(whole, (0,) * len(leaf.shape)):
            end = max(piece.row + math.prod(piece.row_shape), ends.get(piece.name, 0))
            ends[piece.name] = end
            shape = tuple(index.stop for index in piece.of_tensor(slice(0, end)))
            shapes[piece.name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    return shapes


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A function of the arrays of a tree of weights, given the names of their checkpoint tensors.

    Every component of a model has a method ``mapped``, which names its tensors. It returns a tree
    of the component's structure with the map's result in place of every array: the Split of each
    array (see ``splitting``), arrays joined on a device (``joining``), or the arrays as they were,
    in Linears of another format (``choosing``).

    Attributes:
      vector: (name, array or shape, offset) -> result, for arrays with the tensor's layout, plus
        the offset.
      part: (source, kind, array or shape) -> result, for the arrays of a Linear.
      whole: (Linear, source) -> result, for a whole Linear; None: its arrays are replaced.
      norm_offset: see ModelConfig.norm_offset.
    """

    vector: Callable[[str, Any, int], Any]
    part: Callable[[Source, str, Any], Any]
    whole: Callable[[Any, Source], Any] | None = None
    norm_offset: int = 0

    def with_norms(self, offset: int) -> "TensorMap":
        """The same, for a model whose norms have this offset (see ModelConfig.norm_offset)."""
        return dataclasses.replace(self, norm_offset=offset)

    def array(self, name: str, leaf: Any) -> Any:
        """The result for an array ``leaf`` with the tensor's layout; None if ``leaf`` is None."""
        return None if leaf is None else self.vector(name, leaf, 0)

    def norm(self, name: str, leaf: Any) -> Any:
        """``array`` for the weight of a norm that has the model's offset."""
        return None if leaf is None else self.vector(name, leaf, self.norm_offset)

    def linear(self, linear: Any, source: Source) -> Any:
        """The result for a Linear of any kind; None if ``linear`` is None."""
        if linear is None:
            return None
        return linear.mapped(source, self) if self.whole is None else self.whole(linear, source)

    def of_source(self, source: Source, kind: str, leaf: Any) -> Any:
        """The result for an array of a Linear; None if ``leaf`` is None."""
        return None if leaf is None else self.part(source, kind, leaf)


def splitting(num_rows: int | None = None) -> TensorMap:
    """Replaces each array by its Split. Rows past ``num_rows`` of an embedding are padding."""

    def vector(name: str, leaf: Any, offset: int) -> Split:
        return same(name, num_rows if len(leaf.shape) > 1 else None, offset)

    def part(source: Source, kind: str, leaf: Any) -> Split:
        return source.split(kind)

    return TensorMap(vector, part)


def choosing(kind: Callable[[Any, Source], Any]) -> TensorMap:
    """Replaces each Linear by ``kind(linear, source)``; other arrays stay unchanged.

    For shapes, where the checkpoint decides which projections are quantized.
    """

    def part(source: Source, name: str, leaf: Any) -> Any:
        return leaf

    return TensorMap(lambda name, leaf, offset: leaf, part, kind)


def joining(tensors: Tensors) -> TensorMap:
    """Replaces each array by one that is joined on the device from whole tensors."""

    def vector(name: str, leaf: Any, offset: int) -> Array:
        tensor = tensors[name]
        if offset:
            tensor = tensor.astype(jnp.float32) + offset
        padding = [(0, o - t) for o, t in zip(leaf.shape, tensor.shape, strict=True)]
        return jnp.pad(tensor, padding).astype(leaf.dtype)

    def part(source: Source, kind: str, leaf: Any) -> Array:
        return source.join(kind, tensors, leaf.shape).astype(leaf.dtype)

    return TensorMap(vector, part)
