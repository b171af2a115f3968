"""What drafters with their own KV cache share.

Draft KV is indexed by the token it consumed: slot ``i`` holds the entry of token ``i``, in pages
of the target's own page table. Tokens committed since the last draft are *pending*: they are read
(again) first, so that entries guessed while drafting are overwritten by true ones. Tree levels then
use the slots past the root as scratch.
"""

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import LayerCache, page_slots
from jaxspec.models.attention import PagedAttend
from jaxspec.pytree import pytree, static
from jaxspec.sharding import DATA_PARALLEL
from jaxspec.speculation.expand import Beams
from jaxspec.state import EngineState


@pytree
class DraftCache:
    """Pages of the drafter's layers; ``sharded`` when its KV heads are."""

    layers: tuple[LayerCache, ...]
    sharded: bool = static()

    @property
    def partition_rules(self) -> dict[str, str] | None:
        return None if self.sharded else DATA_PARALLEL


def pending_tokens(state: EngineState, counts: Array, width: int) -> tuple[Array, Array, Array]:
    """The last ``counts`` [B] committed tokens, root last, in rows of ``width``.

    Returns (tokens, positions, valid), [B, width] each; nothing is valid in rows that are done.
    """
    start = state.context_lens - counts + 1
    offset = jnp.arange(width)
    positions = start[:, None] + offset
    last = state.tokens.shape[1] - 1
    tokens = jnp.take_along_axis(state.tokens, jnp.clip(positions, 0, last), axis=1)
    return tokens, positions, (offset < counts[:, None]) & state.active[:, None]


def causal_attend(
    state: EngineState, positions: Array, valid: Array, first_slot: int = 0
) -> PagedAttend:
    """Attention of consecutive tokens, each stored at its own position."""
    return PagedAttend(
        page_table=state.page_table,
        context_lens=positions[:, 0],
        slots=page_slots(state.page_table, positions, valid, state.page_size),
        positions=positions,
        first_slot=first_slot,
    )


def level_attend(state: EngineState, beams: Beams, first_slot: int = 0) -> PagedAttend:
    """Attention of one tree level: beams see the context, the root and their own ancestors."""
    past_root = state.context_lens + 1
    scratch = past_root[:, None] + beams.first + jnp.arange(beams.tokens.shape[1])
    positions = beam_positions(state, beams)
    valid = jnp.broadcast_to(state.active[:, None], scratch.shape)
    return PagedAttend(
        page_table=state.page_table,
        context_lens=past_root,
        slots=page_slots(state.page_table, scratch, valid, state.page_size),
        positions=positions,
        ancestors=beams.ancestors,
        num_nodes=beams.num_scratch,  # the same at all levels, which so share a program
        first_slot=first_slot,
    )


def beam_positions(state: EngineState, beams: Beams) -> Array:
    """Sequence position of each beam's token: int32 [B, k]."""
    position = (state.context_lens + beams.depth)[:, None]
    return jnp.broadcast_to(position, beams.tokens.shape)
