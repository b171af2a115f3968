"""What a layer keeps of a sequence, whatever its kind: the operations that the engine knows.

A mixer makes its own kind of state and writes to it in its forward pass. Beyond that the engine
asks for two things only: keep the accepted path of a verified tree, and forget rows that start
anew. A kind of its own (a recurrent state, say) is a pytree in a file of its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, Self

from jax import Array
from jax.sharding import Mesh

from jaxspec.pytree import Pytree, pytree, static
from jaxspec.sharding import Layout
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of an engine's memory. ``num_pages`` counts the null pages too; a state that keeps
    something for each row has ``num_rows`` of them."""

    num_pages: int
    page_size: int
    num_rows: int
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True)
class CommittedPath:
    """The nodes of a verified tree that were accepted, for B rows.

    Attributes:
      rows: [B] the rows' places in a state that keeps something for each row.
      page_table: [B, M].
      context_lens: [B] slots committed before the round; node i lies at slot context_lens + i.
      path: [B, A] accepted nodes by depth.
      counts: [B] how many of them are committed; none of a row that is not decoding.
      is_chain: node i hangs from node i - 1, so accepted nodes already lie where they belong.
    """

    rows: Array
    page_table: Array
    context_lens: Array
    path: Array
    counts: Array
    is_chain: bool


class LayerState(Protocol):
    """A pytree that one layer reads and writes.

    A pass over a prompt's tokens (PagedAttend.ancestors is None) keeps all of them. A pass over a
    tree's nodes is followed by ``commit``, which keeps the accepted ones: until then the state may
    hold what it needs for that, as fields that are None at all other times.
    """

    @property
    def rereads(self) -> bool:
        """Whether tokens may be read again over what is kept of others at their positions. A
        drafter with layers of its own does so: what it keeps of its guesses is never committed."""
        ...

    @classmethod
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """States of many layers of this kind after a path is accepted: in one launch, if it can."""
        ...

    def reset(self, rows: Array) -> Self:
        """The state with rows [B] (indices; those out of range are none) forgotten."""
        ...


LayerStates = tuple[Any, ...]  # of LayerState, one a layer; None where a layer keeps nothing


@pytree
class ModelState(Pytree):
    """What all layers of one model keep, split as the model is."""

    layers: LayerStates
    layout: Layout = static()

    def commit(self, committed: CommittedPath, kernels: Kernels) -> Self:
        """After a path is accepted, kind by kind."""
        result = list(self.layers)
        for kind in dict.fromkeys(type(state) for state in result if state is not None):
            places = [index for index, state in enumerate(result) if type(state) is kind]
            moved = kind.commit([result[index] for index in places], committed, kernels)
            for index, state in zip(places, moved, strict=True):
                result[index] = state
        return self.replace(layers=tuple(result))

    def check_rereads(self, owner: str) -> None:
        """Raises ValueError unless every layer's tokens may be read again (LayerState.rereads)."""
        kinds = {type(state).__name__ for state in self.layers if state and not state.rereads}
        if kinds:
            raise ValueError(
                f"{owner} cannot draft: its layers keep {', '.join(sorted(kinds))}, which does not "
                "let tokens be read again; use a drafter of another kind"
            )

    def reset(self, rows: Array) -> Self:
        """With rows [B] forgotten in every layer."""
        layers = tuple(None if state is None else state.reset(rows) for state in self.layers)
        return self.replace(layers=layers)
