"""What the round asks of a drafter."""

import dataclasses
from typing import Any, Protocol

from jax import Array
from jax.sharding import Mesh

from jaxspec.models.decoder import Decoder
from jaxspec.speculation.tree import DraftTree
from jaxspec.state import EngineState


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens [B, T] that follow each sequence's context; ``counts`` [B] of them are real."""

    tokens: Array
    counts: Array


class Drafter(Protocol):
    """A frozen pytree of weights and static options, with pure methods.

    Attributes:
      capture: target hidden states it reads (see models.decoder.run); () for none.
      num_nodes, max_depth: the size of its trees, root included, and their depth.
    """

    @property
    def capture(self) -> tuple[int, ...]: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def max_depth(self) -> int: ...

    def init_state(self, batch: int, num_pages: int, page_size: int, mesh: Mesh | None) -> Any:
        """Its state for B empty sequences whose pages number ``num_pages`` in all."""
        ...

    def prefill(
        self, target: Decoder, state: EngineState, chunk: PrefillChunk, features: Array | None
    ) -> Any:
        """Draft state after the target has read ``chunk``.

        ``state`` is the one before the chunk; ``features`` [B, T, C] the captured hidden states.
        """
        ...

    def propose(self, target: Decoder, state: EngineState) -> tuple[DraftTree, Any]:
        """A tree that continues each sequence, and the draft state."""
        ...

    def commit(
        self, draft: Any, features: Array | None, path: Array, counts: Array, active: Array
    ) -> Any:
        """Draft state after a verification.

        Args:
          features: [B, N, C] the target's captured hidden states at every node.
          path: [B, A] accepted nodes by depth.
          counts: [B] tokens committed this round, bonus included; path[:, :counts] are the nodes
            that came before them.
          active: [B] rows to change.
        """
        ...
