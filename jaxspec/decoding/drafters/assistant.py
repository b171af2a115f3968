"""Gemma 4's assistants as drafters: they read the target's cache, and keep one hidden state a row.

The state of a round's first step is the target's, after its final norm, of the token before the
root. All steps have the root's position, as in transformers, and see the slots before it.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters.base import Drafter, DraftState, PrefillChunk, Proposed, unchanged
from jaxspec.decoding.drafters.paged import entry_at, make_proposer
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.grow import Beams, grow
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import FINAL_NORM, Decoder
from jaxspec.models.heads.assistant import Assistant
from jaxspec.parallel.pytree import Pytree, array, pytree


@pytree
class AssistantRows(Pytree):
    """``hidden``: the target's hidden state of the token before each row's root, after its final
    norm."""

    hidden: Array = array("batch", "whole_hidden")  # [R, H]


@pytree
class AssistantDrafter(Drafter, Pytree):
    """Drafts a chain or a tree with an assistant, from the target's keys and values."""

    assistant: Assistant

    @property
    def capture(self) -> tuple[int, ...]:
        return (FINAL_NORM,)

    def init_rows(
        self, num_rows: int, target: Decoder, capacity: SpeculationConfig
    ) -> AssistantRows:
        """Raises ValueError for a target without the layers whose keys and values are read."""
        if len(target.layers) != target.config.num_layers:
            raise ValueError("an assistant reads layers of all stages of a pipeline: take pp 1")
        shape = num_rows, target.config.hidden_size
        return AssistantRows(hidden=jnp.zeros(shape, self.assistant.dtype))

    def prefill(
        self,
        target: Decoder,
        state: EngineState,
        chunk: PrefillChunk,
        features: Array | None,
        options: RoundOptions,
    ) -> DraftState:
        assert features is not None
        return _with_hidden(state, features, chunk.counts - 1, chunk.counts > 0)

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        assistant, rows = self.assistant, state.rows
        layers = state.pool.target.layers
        mixers: list[Any] = [target.layers[index].mixer for index in assistant.config.sources]
        lent = tuple(
            mixer.lent(layers[index])
            for mixer, index in zip(mixers, assistant.config.sources, strict=True)
        )

        def logits(tokens: Array, hidden: Array) -> tuple[Array, Array]:
            """Draft logits after tokens [B, k] and hidden states [B, k, H], and the next states."""
            attend = frozen_attend(state, tokens.shape[1])
            following, normed = assistant.run(
                target, tokens, hidden, attend.positions, lent, attend, options.kernels
            )
            return assistant.logits(normed, options.kernels), following

        def step(beams: Beams, before: Array) -> tuple[Array, Array]:
            read = jnp.take_along_axis(before, beams.parents[..., None], axis=1)
            return logits(beams.tokens, read)

        first, following = logits(rows.roots[:, None], rows.draft.hidden[:, None])
        proposer = make_proposer(target, state, options, assistant.vocab_layout)
        tree, _ = grow(proposer, rows.roots, first[:, 0], step, following)
        return tree, unchanged(state)

    def commit(
        self,
        state: EngineState,
        features: Array | None,
        path: Array,
        counts: Array,
        options: RoundOptions,
    ) -> DraftState:
        assert features is not None
        last = jnp.take_along_axis(path, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        return _with_hidden(state, features, last, state.rows.active & (counts > 0))


def frozen_attend(state: EngineState, width: int) -> PagedAttend:
    """Attention of ``width`` drafted tokens at the root's position: each sees the slots before it,
    and none of the others."""
    lens = state.rows.context_lens
    positions = jnp.broadcast_to(lens[:, None], (len(lens), width))
    return PagedAttend(
        rows=state.rows.index,
        page_table=state.rows.page_table,
        context_lens=lens,
        slots=jnp.zeros_like(positions),  # nothing is written
        positions=positions,
        kv_lens=lens,
    )


def _with_hidden(state: EngineState, features: Array, index: Array, changed: Array) -> DraftState:
    """The drafter's state with features [B, T, H] at ``index`` [B], in rows that ``changed``."""
    kept = state.rows.draft.hidden
    new = entry_at(features, index).astype(kept.dtype)
    hidden = jnp.where(changed[:, None], new, kept)
    return unchanged(state).replace(rows=state.rows.draft.replace(hidden=hidden))
