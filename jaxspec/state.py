"""Everything that changes while text is generated, as one frozen pytree."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import LayerCache
from jaxspec.pytree import array, pytree
from jaxspec.sampling import Sampling


@pytree
class Statistics:
    """Counts a sequence since init_state; kept on the device, read when wanted.

    ``accepted`` counts drafted tokens before a stop token or ``max_lens`` cuts them.
    """

    rounds: Array = array("batch")  # int32 [B]
    drafted: Array = array("batch")  # int32 [B], nodes verified, roots not counted
    accepted: Array = array("batch", "depth")  # int32 [B, A], rounds that accepted >= d tokens


@pytree
class EngineState:
    """State of B sequences.

    The root, a sequence's last token, is ``tokens[b, context_lens[b]]``: committed, but its keys
    and values are written by the next round. A sequence is done when it is not active.
    """

    tokens: Array = array("batch", "length")  # int32 [B, S]: prompt, then generated
    context_lens: Array = array("batch")  # int32 [B], tokens whose KV is in the cache
    max_lens: Array = array("batch")  # int32 [B], most tokens, prompt included
    active: Array = array("batch")  # bool [B]
    stop_tokens: Array = array("batch", "stops")  # int32 [B, E], padded with -1
    page_table: Array = array("batch", "table")  # int32 [B, M]
    cache: tuple[LayerCache, ...]
    draft: Any  # the drafter's own state
    sampling: Sampling
    stats: Statistics

    @property
    def page_size(self) -> int:
        return self.cache[0].k.shape[2]

    @property
    def roots(self) -> Array:
        """Last committed token of each sequence: int32 [B]."""
        return jnp.take_along_axis(self.tokens, self.context_lens[:, None], axis=1)[:, 0]


def empty_statistics(batch: int, max_depth: int) -> Statistics:
    return Statistics(
        rounds=jnp.zeros(batch, jnp.int32),
        drafted=jnp.zeros(batch, jnp.int32),
        accepted=jnp.zeros((batch, max_depth + 1), jnp.int32),
    )


def write_tokens(state: EngineState, new: Array, counts: Array) -> Array:
    """Token buffer with ``new`` [B, A] put after the root, the first ``counts`` [B] of each."""
    batch, width = new.shape
    offset = jnp.arange(width)
    position = state.context_lens[:, None] + 1 + offset
    position = jnp.where(offset < counts[:, None], position, state.tokens.shape[1])
    row = jnp.arange(batch)[:, None]
    return state.tokens.at[row, position].set(new, mode="drop")
