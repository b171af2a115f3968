"""The state that a layer keeps of sequences, and the operations on it that the engine uses.

A mixer creates its own kind of state and writes to it in its forward pass. Apart from that the
engine needs a few operations only: keep the accepted path of a verified tree, clear rows that
start a new sequence, and copy pages and rows. Each kind of state (for example a recurrent one) is
a pytree in its own file.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, Self

from jax import Array
from jax.sharding import Mesh

from jaxspec.parallel import Layout
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


LayerStates = tuple[Any, ...]  # one LayerState per layer, or None if the layer keeps nothing


@pytree
class ModelState(Pytree):
    """The states of all layers of one model, sharded as the model is."""

    layers: LayerStates
    layout: Layout = static()

    def commit(self, committed: CommittedPath, kernels: Kernels) -> Self:
        """The state after a path is accepted. States of one kind are committed together."""
        result = list(self.layers)
        for kind in dict.fromkeys(type(state) for state in result if state is not None):
            places = [index for index, state in enumerate(result) if type(state) is kind]
            moved = kind.commit([result[index] for index in places], committed, kernels)
            for index, state in zip(places, moved, strict=True):
                result[index] = state
        return self.replace(layers=tuple(result))

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
        layers = tuple(None if state is None else state.reset(rows) for state in self.layers)
        return self.replace(layers=layers)

    def take(self, pages: Array, rows: Array) -> Self:
        """A copy of what pages [n] and rows [B] hold in every layer."""
        layers = tuple(None if state is None else state.take(pages, rows) for state in self.layers)
        return self.replace(layers=layers)

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        """The state with the result of ``take`` in pages [n] and rows [B]."""
        pairs = zip(self.layers, saved.layers, strict=True)
        layers = tuple(
            None if state is None else state.put(saved_state, pages, rows)
            for state, saved_state in pairs
        )
        return self.replace(layers=layers)
