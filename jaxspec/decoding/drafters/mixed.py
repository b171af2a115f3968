"""Two drafters in one: lookup in rows where it finds a long match, a model in the others.

Text that repeats what was there before is drafted for free, and better than by a small model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import Geometry
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters.base import (
    Drafter,
    DraftState,
    PrefillChunk,
    Proposed,
    StatelessDrafter,
    unchanged,
    with_draft,
)
from jaxspec.decoding.drafters.checks import check_drafter, checked_proposal, checked_state
from jaxspec.decoding.drafters.eagle import EagleDrafter
from jaxspec.decoding.drafters.ngram import NGramDrafter
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree, pad_tree
from jaxspec.models.decoder import Decoder
from jaxspec.parallel import collectives
from jaxspec.parallel.pytree import Pytree, pytree, static

_STATELESS = "the lookup of MixedDrafter must keep no state"


@pytree
class MixedDrafter(Pytree):
    """Drafts with ``lookup`` in each row where it finds a match, and with ``model`` in the others.

    The choice depends on the row's own tokens alone. The model reads every committed token, so it
    drafts as if it had always been used. With ``may_skip``, reading is all that it does in rounds
    in which no row needs its tree.

    Attributes:
      model: any drafter; its cache is this drafter's whole state.
      lookup: NGramDrafter or SuffixDrafter, or another that drafts nothing where it finds nothing;
        its ``min_match`` is the shortest match that is preferred to the model.
      may_skip: compile a branch for the rounds that need no tree of the model. Without it the model
        drafts in every round. On a GPU the branch costs more than it saves: it cuts a round into
        four CUDA graphs, and the host reads two conditions.
    """

    model: Drafter
    lookup: StatelessDrafter = NGramDrafter(min_match=3, max_match=8)
    may_skip: bool = static(default=True)

    @property
    def capture(self) -> tuple[int, ...]:
        return self.model.capture

    @property
    def num_reread_tokens(self) -> int:
        return self.model.num_reread_tokens

    @property
    def past_tokens(self) -> int:
        return self.lookup.past_tokens

    @property
    def tells_confidence(self) -> bool:
        return False  # the model's is not that of rows that look up

    @property
    def listens(self) -> bool:
        return self.model.listens

    def init_pool(self, geometry: Geometry) -> Any:
        check_drafter(self.model, "model of MixedDrafter")
        check_drafter(self.lookup, "lookup of MixedDrafter")
        if self.lookup.init_pool(geometry) is not None:
            raise ValueError(f"{_STATELESS}, and {type(self.lookup).__name__} has a pool")
        return self.model.init_pool(geometry)

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> Any:
        if self.lookup.init_rows(num_rows, target, capacity) is not None:
            raise ValueError(f"{_STATELESS}, and {type(self.lookup).__name__} has rows")
        return self.model.init_rows(num_rows, target, capacity)

    def reset(self, pool: Any, rows: Array) -> Any:
        return self.model.reset(pool, rows)

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        return self.model.most_pending(capacity)

    def catch_up(self, target: Decoder, state: EngineState, options: RoundOptions) -> DraftState:
        return self.model.catch_up(target, state, options)

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        options: RoundOptions,
    ) -> DraftState:
        return self.model.prefill(target, state, chunk, features, options)

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        looked_up, _ = self.lookup.propose(target, state, options)
        found = looked_up.num_nodes > 1
        looked_up = _alike(looked_up, target, options)

        def draft(before: Proposed) -> Proposed:
            _, draft_state = before
            state_before = with_draft(state, draft_state)
            tree, after = self._propose_for(~found, target, state_before, options)
            return _choose(found, looked_up, _alike(tree, target, options)), after

        def read(before: Proposed) -> Proposed:
            tree, draft_state = before
            after = self.model.catch_up(target, with_draft(state, draft_state), options)
            return tree, checked_state(self.model, "catch_up", state, after)

        start = looked_up, unchanged(state)
        if not self.may_skip:
            return draft(start)
        needed = jnp.any(state.rows.active & ~found)
        if target.layout.batch:  # the model may move data between devices: all take one branch
            needed = lax.pmax(needed.astype(jnp.int32), target.layout.batch) > 0
        return _run_if(~needed, read, _run_if(needed, draft, start))

    def _propose_for(
        self, wanted: Array, target: Decoder, state: EngineState, options: RoundOptions
    ) -> Proposed:
        """The model's drafts, of which those of ``wanted`` [B] rows will be used."""
        if isinstance(self.model, EagleDrafter):  # it may end early for them
            return self.model.propose_for(wanted, target, state, options)
        proposal = self.model.propose(target, state, options)
        return checked_proposal(self.model, options, state, proposal)

    def commit(
        self,
        state: EngineState,
        features: Array | None,
        path: Array,
        counts: Array,
        options: RoundOptions,
    ) -> DraftState:
        return self.model.commit(state, features, path, counts, options)


def _run_if[T](condition: Array, function: Callable[[T], T], value: T) -> T:
    """``function(value)`` if ``condition`` [], else ``value``.

    XLA updates large arrays in place in a loop, even one of at most one iteration. The branches of
    lax.cond copy them.
    """

    def body(carry: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.bool_(False), function(carry[1])

    return lax.while_loop(lambda carry: carry[0], body, (condition, value))[1]


def _alike(tree: DraftTree, target: Decoder, options: RoundOptions) -> DraftTree:
    """The tree with as many nodes, and the same static fields, as any other of this call.

    Where tokens are drawn, a tree that was not drawn gets its distributions: all of the probability
    is on the node's own token. Rejection sampling is exact with them.
    """
    shape = options.speculation
    if shape.resolved_proposal == "sampled" and tree.probs is None:
        probs = collectives.one_hot(tree.tokens, target.local_vocab, target.layout)
        tree = tree.replace(probs=probs.astype(jnp.float32))
    tree = pad_tree(tree, max(shape.num_nodes, tree.tokens.shape[1]))
    return tree.replace(max_depth=max(shape.max_depth, tree.max_depth), is_chain=shape.is_chain)


def _choose(first: Array, tree: DraftTree, other: DraftTree) -> DraftTree:
    """``tree`` in the rows where ``first`` [B] is true, ``other`` elsewhere."""

    def choose(x: Array, y: Array) -> Array:
        return jnp.where(first.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, tree, other)
