"""Reads whole prompts, however long, in one call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.decoding.functional.params import EngineParams
from jaxspec.decoding.functional.prefill import prefill
from jaxspec.decoding.functional.subset import listed_rows
from jaxspec.decoding.state import Emitted, EngineState, Status
from jaxspec.parallel.array_checks import Integers


def prefill_all(
    params: EngineParams,
    state: EngineState,
    rows: Integers | None = None,
    *,
    width: int,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    hidden: tuple[int, ...] = (),
    order_invariant: bool = False,
    policy_logprobs: bool = False,
) -> tuple[EngineState, Emitted]:
    """Read the prompts of some rows to their ends, in chunks of ``width`` tokens.

    Each row then decodes, or is done. One program reads all chunks: it reads chunks, as ``prefill``
    does, until no row is reading. It may be called in a ``jit`` or ``vmap``.

    Args:
      width: tokens per row that the program reads at a time; a prompt may be longer.
      rows, columns, greedy, controls: see prefill.
      logprobs, top_logprobs, policy_logprobs, hidden, order_invariant: see prefill.

    Returns the state, and what the B rows emitted, as prefill does: the first token of each prompt
    that has ended. ``num_rounds`` is 0. For the log-probabilities of the prompts' own tokens call
    prefill.

    Raises ValueError as prefill does.
    """

    def read(state: EngineState) -> tuple[EngineState, Emitted]:
        return prefill(
            params,
            state,
            rows,
            width=width,
            columns=columns,
            greedy=greedy,
            controls=controls,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            hidden=hidden,
            order_invariant=order_invariant,
            policy_logprobs=policy_logprobs,
        )

    first = _Carry(jnp.int32(1), *read(state))
    listed = listed_rows(params, state, rows)
    # Rows that are listed in another device's part stay unread, so the loop must not wait for them.
    most = -(-state.rows.tokens.shape[1] // width)

    def unfinished(carry: _Carry) -> Array:
        return (carry.chunks < most) & jnp.any(_status(carry.state, listed) == Status.READING)

    def next_chunk(carry: _Carry) -> _Carry:
        after, emitted = read(carry.state)
        return _Carry(carry.chunks + 1, after, _merged(carry.emitted, emitted))

    _, state, emitted = lax.while_loop(unfinished, next_chunk, first)
    return state, emitted


class _Carry(NamedTuple):
    chunks: Array  # int32 [], read so far
    state: EngineState
    emitted: Emitted


def _status(state: EngineState, rows: Array | None) -> Array:
    """Status of the listed rows: int32 [B], 0 for padding."""
    status = state.rows.status
    if rows is None:
        return status
    inside = (rows >= 0) & (rows < len(status))
    return jnp.where(inside, status[jnp.where(inside, rows, 0)], Status.EMPTY)


def _merged(before: Emitted, after: Emitted) -> Emitted:
    """What two chunks emitted: a row's token is of the chunk in which its prompt ended."""
    ended = after.counts > 0  # [1, B]

    def chosen(old: Array, new: Array) -> Array:
        return jnp.where(ended.reshape(*ended.shape, *(1,) * (new.ndim - 2)), new, old)

    names = ("tokens", "counts", "hidden", "logprobs", "top_tokens", "top_logprobs")
    names = (*names, "policy_logprobs")
    pairs: dict[str, Any] = {name: (getattr(before, name), getattr(after, name)) for name in names}
    merged = {name: jax.tree.map(chosen, *pair) for name, pair in pairs.items()}
    return after.replace(**merged)
