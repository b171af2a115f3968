"""The state that a layer keeps of sequences, and the operations on it that the engine uses.

A mixer creates its own kind of state and writes to it in its forward pass. Apart from that the
engine needs a few operations only: keep the accepted path of a verified tree, clear rows that
start a new sequence, and copy pages and rows. Each kind of state (for example a recurrent one) is
a pytree in its own file.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxspec.parallel import Layout, named_shardings
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of an engine's memory.

    ``num_pages`` includes the null pages. ``num_rows`` is used by states with an entry per row.
    """

    num_pages: int
    page_size: int
    num_rows: int
    mesh: Mesh | None = None


@pytree
class CommittedPath(Pytree):
    """The accepted nodes of a verified tree, for B rows.

    Attributes:
      rows: [B] index of each row in states with an entry per row.
      page_table: [B, M].
      context_lens: [B] slots committed before the round; node i is at slot context_lens + i.
      path: [B, A] accepted nodes by depth.
      counts: [B] number of them that are committed; 0 for rows that are not decoding.
      is_chain: the parent of node i is node i - 1, so accepted nodes are in their final slots.
    """

    rows: Array = array("batch")
    page_table: Array = array("batch", "table")
    context_lens: Array = array("batch")
    path: Array = array("batch", "depth")
    counts: Array = array("batch")
    is_chain: bool = static()


class LayerState(Protocol):
    """A pytree that one layer reads and writes.

    A pass over prompt tokens (PagedAttend.ancestors is None) keeps all of them. A pass over tree
    nodes is followed by ``commit``, which keeps the accepted ones. In between, the state may have
    extra fields for ``commit``, which are None at all other times.
    """

    @property
    def overwritable(self) -> bool:
        """Whether a later pass may overwrite the entries of earlier tokens at the same positions.

        Drafters with layers need this: entries of drafted tokens are never committed, but
        overwritten.
        """
        ...

    @classmethod
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """The states of many layers of this kind after a path is accepted, computed together so
        that one kernel launch can serve them all."""
        ...

    def reset(self, rows: Array) -> Self:
        """The state with rows [B] cleared; indices out of range are ignored."""
        ...

    def take(self, pages: Array, rows: Array) -> Self:
        """A copy of what pages [n] and rows [B] hold, in that order."""
        ...

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        """The state with the result of ``take`` in pages [n] and rows [B]."""
        ...


class PagedState(Pytree):
    """A LayerState of which all arrays are pages [P, ...].

    A new sequence reads only slots that it has written, so none are cleared.
    """

    @property
    def overwritable(self) -> bool:
        return True

    def reset(self, rows: Array) -> Self:
        return self

    def take(self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x: x[pages], self)

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x, copies: x.at[pages].set(copies), self, saved)


def zeros_like_shapes[T](shapes: T, geometry: Geometry, layout: Layout) -> T:
    """Zeros for a tree of ShapeDtypeStructs. With a mesh, they are made on its devices directly."""
    if geometry.mesh is None:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    places = named_shardings(geometry.mesh, shapes, layout)
    return jax.tree.map(lambda x, to: jnp.zeros(x.shape, x.dtype, device=to), shapes, places)


def _kind(state: Any) -> tuple[Any, ...]:
    """The class of a state, and the shapes and dtypes of its arrays."""
    return type(state), *((x.shape, x.dtype) for x in jax.tree.leaves(state))


LayerStates = tuple[Any, ...]  # one LayerState per layer, or None if the layer keeps nothing


def commit_all(states: LayerStates, committed: CommittedPath, kernels: Kernels) -> LayerStates:
    """States of many layers after a path is accepted. Those of one kind and of equal shapes are
    committed together."""
    result, alike = list(states), dict[Any, list[int]]()
    for index, state in enumerate(result):
        if state is not None:
            alike.setdefault(_kind(state), []).append(index)
    for (kind, *_), places in alike.items():
        moved = kind.commit([result[index] for index in places], committed, kernels)
        for index, state in zip(places, moved, strict=True):
            result[index] = state
    return tuple(result)


@pytree
class ModelState(Pytree):
    """The states of all layers of one model, sharded as the model is."""

    layers: LayerStates
    layout: Layout = static()

    def commit(self, committed: CommittedPath, kernels: Kernels) -> Self:
        """The state after a path is accepted."""
        return self.replace(layers=commit_all(self.layers, committed, kernels))

    def check_overwritable(self, owner: str) -> None:
        """Raises ValueError unless the entries of every layer may be overwritten."""
        kinds = {type(state).__name__ for state in self.layers if state and not state.overwritable}
        if kinds:
            raise ValueError(
                f"{owner} cannot draft: its layers keep {', '.join(sorted(kinds))}, whose entries "
                "cannot be overwritten; use another kind of drafter"
            )

    def reset(self, rows: Array) -> Self:
        """The state with rows [B] cleared in every layer."""
        return self._each(lambda state: state.reset(rows))

    def take(self, pages: Array, rows: Array) -> Self:
        """A copy of what pages [n] and rows [B] hold in every layer."""
        return self._each(lambda state: state.take(pages, rows))

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        """The state with the result of ``take`` in pages [n] and rows [B]."""
        return self._each(lambda state, copies: state.put(copies, pages, rows), saved.layers)

    def with_copies(self, source: Array, destination: Array) -> Self:
        """The state with pages ``source`` [n] copied to pages ``destination`` [n]."""
        none = jnp.zeros(0, jnp.int32)  # no rows
        return self.put(self.take(source, none), destination, none)

    def _each(self, change: Callable[..., Any], *others: LayerStates) -> Self:
        """With the results for each layer that keeps something."""
        layers = zip(self.layers, *others, strict=True)
        return self.replace(
            layers=tuple(None if state is None else change(state, *rest) for state, *rest in layers)
        )
