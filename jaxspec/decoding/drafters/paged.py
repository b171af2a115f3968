"""Shared by the drafters that have their own KV cache.

Draft KV is indexed by the input token: slot ``i`` holds the entry of token ``i``, in pages of the
target's page table. Tokens committed since the last draft are *pending*: they are read (again)
first, which overwrites the entries of drafted tokens. The levels of the tree then use the slots
past the root as scratch.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import page_slots
from jaxspec.decoding.drafters.base import Drafter, DraftState
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.grow import Beams, Proposer
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.parallel import Layout


@dataclasses.dataclass(frozen=True)
class TokenRun:
    """Consecutive committed tokens of each row and their positions, [B, T].

    ``valid`` [B, T] marks the real ones, which come first; ``written`` those whose KV is written.
    ``of_prompts``: devices that share sequences split them (see Layout.split_tokens).
    """

    tokens: Array
    positions: Array
    valid: Array
    written: Array
    of_prompts: bool = False


def make_proposer(
    target: Decoder,
    state: EngineState,
    options: RoundOptions,
    layout: Layout,
    token_ids: Array | None = None,
) -> Proposer:
    """How children are chosen from draft logits that ``layout`` splits; ``token_ids`` [W]: the
    target's ids of a reduced draft vocabulary."""
    return Proposer(
        options=options,
        sampling=state.rows.sampling,
        context_lens=state.rows.context_lens,
        layout=layout,
        token_ids=token_ids,
        target_vocab=target.local_vocab,
        target_layout=target.layout,
    )


def pending_tokens(state: EngineState, counts: Array, width: int) -> TokenRun:
    """The last ``counts`` [B] committed tokens of each row, root last, padded to ``width``.

    No token is valid in rows that are not decoding.
    """
    rows = state.rows
    start = rows.context_lens - counts + 1
    offset = jnp.arange(width)
    positions = start[:, None] + offset
    last = rows.tokens.shape[1] - 1
    tokens = jnp.take_along_axis(rows.tokens, jnp.clip(positions, 0, last), axis=1)
    valid = (offset < counts[:, None]) & rows.active[:, None]
    return TokenRun(tokens, positions, valid, valid)


class KeepsFeatures(Drafter):
    """A drafter whose rows (PendingRows) keep the captured states, ``features`` [R, A, C], that
    pending tokens are read with."""

    def commit(
        self,
        state: EngineState,
        features: Array | None,
        path: Array,
        counts: Array,
        options: RoundOptions,
    ) -> DraftState:
        """See Drafter.commit. The states of the tokens that the round committed replace those that
        the rows keep; after plain rounds, that of the new token is added to them."""
        assert features is not None
        rows = state.rows.draft
        active, features = state.rows.active, features.astype(rows.features.dtype)
        if options.speculation.is_plain:  # one more token is pending
            place = jnp.arange(rows.features.shape[1]) == rows.pending[:, None]
            waiting = jnp.where(place[..., None], features[:, :1], rows.features)
            counts = rows.pending + counts
        else:
            waiting = jnp.take_along_axis(features, path[..., None], axis=1)
            padding = rows.features.shape[1] - waiting.shape[1]
            waiting = jnp.pad(waiting, ((0, 0), (0, padding), (0, 0)))
        rows = rows.replace(
            features=jnp.where(active[:, None, None], waiting, rows.features),
            pending=jnp.where(active, counts, rows.pending),
        )
        return DraftState(pool=state.pool.draft, rows=rows)


def entry_at(x: Array, index: Array) -> Array:
    """Entry ``index`` [B] of each row of x [B, T, C]; negative indices mean the first: [B, C]."""
    return jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]


def prompt_tokens(state: EngineState, tokens: Array, counts: Array) -> TokenRun:
    """A chunk [B, T] that follows each row's context; the first ``counts`` [B] tokens are real.

    Cached tokens are not written, because other rows may read their pages.
    """
    rows, offset = state.rows, jnp.arange(tokens.shape[1])
    positions = rows.context_lens[:, None] + offset
    valid = offset < counts[:, None]
    written = valid & (positions >= rows.cached_lens[:, None])
    return TokenRun(tokens, positions, valid, written, of_prompts=True)


def causal_attend(
    state: EngineState, run: TokenRun, first_slot: int = 0, *, order_invariant: bool = False
) -> PagedAttend:
    """Attention of consecutive tokens, each written to the slot of its position."""
    start = run.positions[:, 0]
    return PagedAttend(
        rows=state.rows.index,
        page_table=state.rows.page_table,
        context_lens=start,
        slots=page_slots(state.rows.page_table, run.positions, run.written, state.pool.page_size),
        positions=run.positions,
        kv_lens=start + jnp.sum(run.valid, axis=1, dtype=jnp.int32),
        first_slot=first_slot,
        order_invariant=order_invariant,
        split_tokens=run.of_prompts,
    )


def level_attend(state: EngineState, beams: Beams, first_slot: int = 0) -> PagedAttend:
    """Attention of one tree level: beams see the context, the root and their own ancestors."""
    rows = state.rows
    past_root = rows.context_lens + 1
    scratch = past_root[:, None] + beams.nodes
    valid = jnp.broadcast_to(rows.active[:, None], scratch.shape)
    return PagedAttend(
        rows=rows.index,
        page_table=rows.page_table,
        context_lens=past_root,
        slots=page_slots(rows.page_table, scratch, valid, state.pool.page_size),
        positions=beam_positions(state, beams),
        kv_lens=past_root + (beams.first + beams.tokens.shape[1]),
        ancestors=beams.ancestors,
        first_slot=first_slot,
    )


def beam_positions(state: EngineState, beams: Beams) -> Array:
    """Sequence position of each beam's token: int32 [B, k]."""
    position = (state.rows.context_lens + beams.depth)[:, None]
    return jnp.broadcast_to(position, beams.tokens.shape)
