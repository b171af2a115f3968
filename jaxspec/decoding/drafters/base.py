"""The interface between a round and a drafter.

To add your own drafter, write a class with the methods of Drafter and pass an instance to
EngineParams. Most subclass StatelessDrafter and implement ``propose``, and what changes their state
if they have some.
"""

from typing import Any, Protocol

from jax import Array

from jaxspec.cache import Geometry, ModelState
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree, root_only
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.pytree import Pytree, array, pytree


@pytree
class PrefillChunk(Pytree):
    """Prompt tokens [B, T] that follow each row's context; the first ``counts`` [B] are real."""

    tokens: Array
    counts: Array


@pytree
class DraftState(Pytree):
    """A drafter's state: its part of the pool, and its arrays with an entry per row."""

    pool: Any = None
    rows: Any = None


@pytree
class PendingRows(Pytree):
    """The arrays of a drafter that counts how many tokens of each row it has not read yet.

    While all rows' counts allow more, plain rounds go on without it (see Drafter.most_pending).
    ``heard``: of a drafter that listens, the tokens of plain rounds that it was compared with since
    the row's prompt was read, and how many of them it would have drafted.
    """

    pending: Array = array("batch")  # int32 [R]
    heard: Array | None = array("batch", "two", default=None)  # int32 [R, 2]

    def left(self, most: int) -> Array:
        """How many tokens more may be pending, of at most ``most``: int32 [R]."""
        return most - self.pending


def heard_by(rows: Any) -> Array | None:
    """What a drafter with these ``state.rows.draft`` has heard: see PendingRows."""
    return rows.heard if isinstance(rows, PendingRows) else None


Proposed = tuple[DraftTree, DraftState]  # what a drafter drafts, and its state afterwards


def unchanged(state: EngineState) -> DraftState:
    """The drafter's state as it is in the engine's: what a method returns that changes nothing."""
    return DraftState(pool=state.pool.draft, rows=state.rows.draft)


def with_draft(state: EngineState, draft: DraftState) -> EngineState:
    """The engine's state with another state of the drafter."""
    pool, rows = state.pool.replace(draft=draft.pool), state.rows.replace(draft=draft.rows)
    return state.replace(pool=pool, rows=rows)


class Drafter(Protocol):
    """A frozen pytree of weights and static options, with pure methods.

    ``state`` is the engine's; ``state.pool.draft`` and ``state.rows.draft`` belong to the drafter.
    A method gets the rows of its call, which may be a subset of the engine's rows. A subclass
    writes those methods in which it differs from a drafter that keeps no state.
    """

    @property
    def capture(self) -> tuple[int, ...]:
        """Target hidden states that it reads (see models.decoder.run); () for none."""
        return ()

    @property
    def num_reread_tokens(self) -> int:
        """How many of the cached tokens that a row begins with are read once more, for hidden
        states that the drafter needs: at least 1."""
        return 1

    @property
    def past_tokens(self) -> int:
        """Tokens of past text (``state.pool.past``) that it looks up; 0: there is none."""
        return 0

    @property
    def tells_confidence(self) -> bool:
        """Whether its chains have a ``confidence`` (see DraftTree) in calls that ask for it."""
        return False

    @property
    def listens(self) -> bool:
        """Whether its rows tell what it has heard of plain rounds: see PendingRows."""
        return False

    def init_pool(self, geometry: Geometry) -> Any:
        """The drafter's part of an empty pool."""
        return None

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> Any:
        """The drafter's state of ``num_rows`` new rows: a pytree of arrays [R, ...]."""
        return None

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        options: RoundOptions,
    ) -> DraftState:
        """The drafter's state after the target has read ``chunk``.

        ``state`` is the state before the chunk. ``features`` [B, T, C] are the captured hidden
        states.
        """
        return unchanged(state)

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        """A tree that continues each row, no larger than ``options.speculation``, and the drafter's
        state."""
        raise NotImplementedError(f"{type(self).__name__} must write propose")

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        """The most *pending* tokens: committed, but not yet read by the drafter (root included).

        As many must fit as a round commits that commits all that it can. None: no limit, and
        ``catch_up`` does nothing.
        """
        return None

    def catch_up(self, target: Decoder, state: EngineState, options: RoundOptions) -> DraftState:
        """The drafter's state after it reads all pending tokens; then only the root is pending."""
        return unchanged(state)

    def reset(self, pool: Any, rows: Array) -> Any:
        """The drafter's part of the pool with rows [B] cleared; ignores indices out of range."""
        return pool.reset(rows) if isinstance(pool, ModelState) else pool

    def commit(
        self,
        state: EngineState,
        features: Array | None,
        path: Array,
        counts: Array,
        options: RoundOptions,
    ) -> DraftState:
        """The drafter's state after a verification. Only rows that are decoding may change.

        Args:
          features: [B, N, C] the target's captured hidden states at every node.
          path: [B, A] accepted nodes by depth.
          counts: [B] tokens committed this round, bonus included; path[:, :counts] are the nodes
            that they were sampled from.
          options: if they are plain, nothing was proposed: the new token becomes pending, too.
        """
        return unchanged(state)


@pytree
class StatelessDrafter(Drafter, Pytree):
    """A drafter without state, or with state that stays as it is unless a method changes it.

    A subclass implements ``propose``. One with a memory gives it in ``init_rows`` or ``init_pool``,
    and changes it in the methods that it writes; all others return it as it was.
    """


@pytree
class NoDrafter(StatelessDrafter):
    """Plain decoding: every round verifies only the root and commits one token."""

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        return root_only(state.rows.roots), unchanged(state)
