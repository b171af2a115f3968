"""What the round asks of a drafter.

A drafter of your own is a class like these in a file of its own, given to EngineParams as an
object. One that keeps nothing between rounds subclasses StatelessDrafter and writes ``propose``.
"""

from typing import Any, Protocol

from jax import Array

from jaxspec.cache import Geometry
from jaxspec.config import SpeculationConfig
from jaxspec.models.decoder import Decoder
from jaxspec.pytree import Pytree, pytree
from jaxspec.speculation.call import Call
from jaxspec.speculation.tree import DraftTree
from jaxspec.state import EngineState


@pytree
class PrefillChunk(Pytree):
    """Prompt tokens [B, T] that follow each row's context; ``counts`` [B] of them are real."""

    tokens: Array
    counts: Array


@pytree
class DraftState(Pytree):
    """What a drafter keeps: its part of the pool, and what it keeps of each row."""

    pool: Any = None
    rows: Any = None


class Drafter(Protocol):
    """A frozen pytree of weights and static options, with pure methods.

    ``state`` is the engine's: ``state.pool.draft`` and ``state.rows.draft`` are the drafter's own.
    A method sees the rows of its call, which may be some of the engine's.
    """

    @property
    def capture(self) -> tuple[int, ...]:
        """Target hidden states it reads (see models.decoder.run); () for none."""
        ...

    def init_pool(self, geometry: Geometry) -> Any:
        """Its part of an empty pool."""
        ...

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> Any:
        """What it keeps of ``num_rows`` rows that are new: a pytree of arrays [R, ...]."""
        ...

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        call: Call,
    ) -> DraftState:
        """After the target has read ``chunk``.

        ``state`` is the one before the chunk; ``features`` [B, T, C] the captured hidden states.
        """
        ...

    def propose(
        self, target: Decoder, state: EngineState, call: Call
    ) -> tuple[DraftTree, DraftState]:
        """A tree that continues each row, no larger than ``call.speculation``."""
        ...

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        """Committed tokens that it can let wait; None: any number, ``catch_up`` does nothing."""
        ...

    def catch_up(self, target: Decoder, state: EngineState, call: Call) -> DraftState:
        """Read all committed tokens that wait, so that only the root does."""
        ...

    def reset(self, pool: Any, rows: Array) -> Any:
        """Its part of the pool with rows [B] forgotten (indices; those out of range are none)."""
        ...

    def commit(
        self, state: EngineState, features: Array | None, path: Array, counts: Array, call: Call
    ) -> DraftState:
        """After a verification; only what it keeps of rows that decode may change.

        Args:
          features: [B, N, C] the target's captured hidden states at every node.
          path: [B, A] accepted nodes by depth.
          counts: [B] tokens committed this round, bonus included; path[:, :counts] are the nodes
            that came before them.
          call: in a plain one nothing was proposed: the new token waits beside those that did.
        """
        ...


@pytree
class StatelessDrafter(Pytree):
    """A drafter that keeps nothing between rounds. A subclass writes ``propose``."""

    @property
    def capture(self) -> tuple[int, ...]:
        return ()

    def init_pool(self, geometry: Geometry) -> None:
        return None

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> None:
        return None

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        call: Call,
    ) -> DraftState:
        return DraftState()

    def propose(
        self, target: Decoder, state: EngineState, call: Call
    ) -> tuple[DraftTree, DraftState]:
        raise NotImplementedError(f"{type(self).__name__} must write propose")

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        return None

    def catch_up(self, target: Decoder, state: EngineState, call: Call) -> DraftState:
        return DraftState()

    def reset(self, pool: None, rows: Array) -> None:
        return None

    def commit(
        self, state: EngineState, features: Array | None, path: Array, counts: Array, call: Call
    ) -> DraftState:
        return DraftState()
