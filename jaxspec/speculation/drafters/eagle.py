"""Draft heads as drafters: EAGLE-1, 2, 3 and 3.1, and later kinds of head."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from jaxspec.pytree import Pytree, array, pytree
from jaxspec.speculation.call import Call
from jaxspec.speculation.drafters.base import DraftState, PrefillChunk
from jaxspec.speculation.drafters.paged import (
    TokenRun,
    beam_positions,
    causal_attend,
    level_attend,
    pending_tokens,
    prompt_tokens,
)
from jaxspec.speculation.expand import Beams, Proposer, grow
from jaxspec.speculation.tree import DraftTree
from jaxspec.state import EngineState

FIRST_SLOT = 1  # there is no hidden state before token 0, so slot 0 is never read


@pytree
class HeadRows(Pytree):
    """``pending``: number of committed tokens of each row, root included, that the head has not
    read yet with the target's hidden states. ``features[:, t]`` is the captured state of the token
    before the ``t``-th of them."""

    features: Array = array("batch", "depth", "features")  # [R, A, C]
    pending: Array = array("batch")  # int32 [R]


@pytree
class EagleDrafter(Pytree):
    """Drafts a chain or a dynamic tree with a draft head."""

    head: DraftHead

    @property
    def capture(self) -> tuple[int, ...]:
        return self.head.capture

    def init_pool(self, geometry: Geometry) -> ModelState:
        pool = self.head.init_state(geometry)
        pool.check_rereads("this head")
        return pool

    def init_rows(self, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> HeadRows:
        shape = (num_rows, capacity.max_depth + 1, self.head.feature_size(target))
        return HeadRows(
            features=jnp.zeros(shape, self.head.dtype), pending=jnp.zeros(num_rows, jnp.int32)
        )

    def reset(self, pool: ModelState, rows: Array) -> ModelState:
        return pool.reset(rows)

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        return capacity.max_depth + 1

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        call: Call,
    ) -> DraftState:
        assert features is not None
        pool, rows = _own(state)
        features = features.astype(rows.features.dtype)
        before = _at(rows.features, rows.pending - 1)
        shifted = jnp.concatenate([before[:, None], features[:, :-1]], axis=1)
        run = prompt_tokens(state, chunk.tokens, chunk.counts)
        _, _, layers = self._read(target, state, run, shifted, call, many=True)
        changed = chunk.counts > 0
        last = _at(features, chunk.counts - 1)
        kept = jnp.where(changed[:, None], last, rows.features[:, 0])
        rows = rows.replace(
            features=rows.features.at[:, 0].set(kept),
            pending=jnp.where(changed, 1, rows.pending),
        )
        return DraftState(pool=pool.replace(layers=layers), rows=rows)

    def _read(
        self,
        target: Decoder,
        state: EngineState,
        run: TokenRun,
        features: Array,
        call: Call,
        *,
        many: bool = False,
    ) -> tuple[Array, Array, LayerStates]:
        """Run the head on committed tokens and the captured states [B, T, C] before them; see
        HeadOutput."""
        pool, _ = _own(state)
        attend = causal_attend(state, run, FIRST_SLOT)
        hidden = self.head.hidden(features, call.kernels)
        return self.head.run(
            target,
            run.tokens,
            hidden,
            run.positions - 1,
            pool.layers,
            attend,
            call.kernels,
            many=many,
        )

    def _read_pending(
        self, target: Decoder, state: EngineState, width: int, call: Call
    ) -> tuple[Array, Array, LayerStates]:
        _, rows = _own(state)
        run = pending_tokens(state, rows.pending, width)
        return self._read(target, state, run, rows.features[:, :width], call)

    def catch_up(self, target: Decoder, state: EngineState, call: Call) -> DraftState:
        pool, rows = _own(state)
        _, _, layers = self._read_pending(target, state, rows.features.shape[1], call)
        active = state.rows.active
        last = jnp.where(active[:, None], _at(rows.features, rows.pending - 1), rows.features[:, 0])
        rows = rows.replace(
            features=rows.features.at[:, 0].set(last),
            pending=jnp.where(active, 1, rows.pending),
        )
        return DraftState(pool=pool.replace(layers=layers), rows=rows)

    def propose(
        self, target: Decoder, state: EngineState, call: Call
    ) -> tuple[DraftTree, DraftState]:
        pool, rows = _own(state)
        width = call.speculation.max_depth + 1
        hidden, normed, layers = self._read_pending(target, state, width, call)
        root_hidden, root_normed = (_at(x, rows.pending - 1) for x in (hidden, normed))

        def step(beams: Beams, carry: Any) -> tuple[Array, Any]:
            hidden, layers = carry
            out = self.head.run(
                target,
                beams.tokens,
                jnp.take_along_axis(hidden, beams.parents[..., None], axis=1),
                beam_positions(state, beams) - 1,
                layers,
                level_attend(state, beams, FIRST_SLOT),
                call.kernels,
            )
            logits = self.head.logits(target, out.normed, call.kernels)
            return logits, (out.hidden, out.states)

        proposer = Proposer(
            call=call,
            sampling=state.rows.sampling,
            context_lens=state.rows.context_lens,
            layout=self.head.vocab_layout(target),
            token_ids=self.head.token_ids,
            target_vocab=target.local_vocab,
            target_layout=target.layout,
        )
        root_logits = self.head.logits(target, root_normed, call.kernels)
        carry = (root_hidden[:, None], layers)
        tree, (_, layers) = grow(proposer, state.rows.roots, root_logits, step, carry)
        return tree, DraftState(pool=pool.replace(layers=layers), rows=rows)

    def commit(
        self, state: EngineState, features: Array | None, path: Array, counts: Array, call: Call
    ) -> DraftState:
        assert features is not None
        pool, rows = _own(state)
        active, features = state.rows.active, features.astype(rows.features.dtype)
        if call.speculation.is_plain:  # one more token is pending
            place = jnp.arange(rows.features.shape[1]) == rows.pending[:, None]
            waiting = jnp.where(place[..., None], features[:, :1], rows.features)
            pending = rows.pending + counts
        else:
            waiting = jnp.take_along_axis(features, path[..., None], axis=1)
            room = rows.features.shape[1] - waiting.shape[1]
            waiting = jnp.pad(waiting, ((0, 0), (0, room), (0, 0)))
            pending = counts
        rows = HeadRows(
            features=jnp.where(active[:, None, None], waiting, rows.features),
            pending=jnp.where(active, pending, rows.pending),
        )
        return DraftState(pool=pool, rows=rows)


def _own(state: EngineState) -> tuple[ModelState, HeadRows]:
    return state.pool.draft, state.rows.draft


def _at(x: Array, index: Array) -> Array:
    """Entry ``index`` [B] of each row of x [B, T, C]; negative indices mean the first: [B, C]."""
    return jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]
