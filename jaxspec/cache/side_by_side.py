"""The state of a layer that has two mixers side by side, or a mixer and embeddings of n-grams."""

from collections.abc import Sequence
from typing import Any, Self

from jax import Array

from jaxspec.cache.layer_state import CommittedPath, commit_all
from jaxspec.parallel.pytree import Pytree, pytree
from pallas_kernels.selection import Kernels


@pytree
class SideBySideState(Pytree):
    """The LayerState of two mixers, or of a mixer and n-grams: that of each."""

    first: Any
    second: Any

    @property
    def overwritable(self) -> bool:
        return self.first.overwritable and self.second.overwritable

    @classmethod
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Those of one kind are committed together, of all layers."""
        each = (*(state.first for state in states), *(state.second for state in states))
        moved = commit_all(each, committed, kernels)
        pairs = zip(moved[: len(states)], moved[len(states) :], strict=True)
        return [cls(first=first, second=second) for first, second in pairs]

    def reset(self, rows: Array) -> Self:
        return self.replace(first=self.first.reset(rows), second=self.second.reset(rows))

    def take(self, pages: Array, rows: Array) -> Self:
        return self.replace(
            first=self.first.take(pages, rows), second=self.second.take(pages, rows)
        )

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        return self.replace(
            first=self.first.put(saved.first, pages, rows),
            second=self.second.put(saved.second, pages, rows),
        )
