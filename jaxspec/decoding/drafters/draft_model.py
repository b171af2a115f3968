"""A separate, smaller language model as drafter (Leviathan et al., arXiv 2211.17192)."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters.base import (
    Drafter,
    DraftState,
    PendingRows,
    PrefillChunk,
    Proposed,
)
from jaxspec.decoding.drafters.paged import (
    beam_positions,
    causal_attend,
    entry_at,
    level_attend,
    make_proposer,
    pending_tokens,
    prompt_tokens,
)
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.grow import Beams, grow
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.pytree import Pytree, pytree


@pytree
class DraftModelRows(PendingRows):
    """``pending``: number of committed tokens of each row, root included, that the model has not
    read yet."""


@pytree
class DraftModelDrafter(Drafter, Pytree):
    """Drafts with ``model``, whose tokens must be the target's; MappedModelDrafter maps others."""

    model: Decoder

    @property
    def token_ids(self) -> Array | None:
        """The target's id of each token that has logits: int32 [W]; None: they are equal."""
        return None

    def model_tokens(self, tokens: Array) -> Array:
        """The model's tokens for the target's, of any shape."""
        return tokens

    def draft_logits(self, hidden: Array, options: RoundOptions) -> Array:
        """Logits [..., W / shards] of what may be drafted after hidden states [..., H]."""
        return decoder.logits(self.model, hidden, options.kernels)

    def init_pool(self, geometry: Geometry) -> ModelState:
        pool = self.model.init_state(geometry)
        pool.check_overwritable("this draft model")
        return pool

    def init_rows(
        self, num_rows: int, target: Decoder, capacity: SpeculationConfig
    ) -> DraftModelRows:
        return DraftModelRows(pending=jnp.zeros(num_rows, jnp.int32))

    def most_pending(self, capacity: SpeculationConfig) -> int | None:
        return capacity.max_depth + 1

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        options: RoundOptions,
    ) -> DraftState:
        pool, rows = _draft_state(state)
        run = prompt_tokens(state, chunk.tokens, chunk.counts)
        attend = causal_attend(state, run)
        _, layers, _ = self._run(run.tokens, run.positions, pool.layers, attend, options)
        pending = jnp.where(chunk.counts > 0, 1, rows.pending)
        return DraftState(pool=pool.replace(layers=layers), rows=rows.replace(pending=pending))

    def _run(
        self,
        tokens: Array,
        positions: Array,
        layers: LayerStates,
        attend: PagedAttend,
        options: RoundOptions,
    ) -> tuple[Array, LayerStates, Array | None]:
        """The model's pass over the target's tokens [B, T]; see models.decoder.run."""
        ids, kernels = self.model_tokens(tokens), options.kernels
        return decoder.run(self.model, ids, positions, layers, attend, kernels=kernels)

    def _read_pending(
        self, state: EngineState, width: int, options: RoundOptions
    ) -> tuple[Array, LayerStates]:
        """Read up to ``width`` pending tokens: the roots' hidden states [B, H], and the cache."""
        pool, rows = _draft_state(state)
        run = pending_tokens(state, rows.pending, width)
        attend = causal_attend(state, run)
        hidden, layers, _ = self._run(run.tokens, run.positions, pool.layers, attend, options)
        return entry_at(hidden, rows.pending - 1), layers

    def catch_up(self, target: Decoder, state: EngineState, options: RoundOptions) -> DraftState:
        pool, rows = _draft_state(state)
        width = self.most_pending(state.capacity)
        assert width is not None
        _, layers = self._read_pending(state, width, options)
        pending = jnp.where(state.rows.active, 1, rows.pending)
        return DraftState(pool=pool.replace(layers=layers), rows=rows.replace(pending=pending))

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        pool, rows = _draft_state(state)
        width = options.speculation.max_depth + 1
        root_hidden, layers = self._read_pending(state, width, options)

        def step(beams: Beams, layers: Any) -> tuple[Array, Any]:
            positions, attend = beam_positions(state, beams), level_attend(state, beams)
            hidden, layers, _ = self._run(beams.tokens, positions, layers, attend, options)
            return self.draft_logits(hidden, options), layers

        proposer = make_proposer(target, state, options, self.model.layout, self.token_ids)
        root_logits = self.draft_logits(root_hidden, options)
        tree, layers = grow(proposer, state.rows.roots, root_logits, step, layers)
        return tree, DraftState(pool=pool.replace(layers=layers), rows=rows)

    def commit(
        self,
        state: EngineState,
        features: Array | None,
        path: Array,
        counts: Array,
        options: RoundOptions,
    ) -> DraftState:
        pool, rows = _draft_state(state)
        pending = rows.pending + counts if options.speculation.is_plain else counts
        pending = jnp.where(state.rows.active, pending, rows.pending)
        return DraftState(pool=pool, rows=rows.replace(pending=pending))


def _draft_state(state: EngineState) -> tuple[ModelState, DraftModelRows]:
    return state.pool.draft, state.rows.draft
