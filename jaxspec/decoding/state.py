"""All state that changes during generation, as one frozen pytree: a pool and rows."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import ModelState
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.past_text import PastText
from jaxspec.decoding.sampling import Controls, Sampling
from jaxspec.parallel.pytree import Pytree, array, pytree, static


class Status(enum.IntEnum):
    """What a row is doing."""

    EMPTY = 0
    READING = 1  # its prompt
    DECODING = 2
    DONE = 3


class Ending(enum.IntEnum):
    """Why a row is done: ``Ending(int(state.rows.ending[row]))``.

    STOP and LENGTH are the ends of texts, the others errors, for which the row generates nothing
    more. Of BAD_TOKEN, BUSY and UNREAD known values are an error before the call; traced ones, in a
    ``jit`` or ``vmap``, end the row.
    """

    NONE = 0  # it is not done
    STOP = 1  # its last token is a stop token
    LENGTH = 2  # it has reached its limit of tokens
    NOT_FINITE = 3  # error: the logits were NaN or infinite, or no token was allowed
    TOO_LONG = 4  # error: its prompt or its limit does not fit its pages or its token buffer
    NOT_GREEDY = 5  # error: it samples, but the call was for greedy rows only
    MISPLACED = 6  # error, emitted only: listed in another device's part of ``rows``; unchanged
    UNCONTROLLED = 7  # error: it has controls, but the call applied none
    BAD_TOKEN = 8  # error: its prompt has a token id outside the vocabulary
    BUSY = 9  # error: a prompt was admitted to it as it was reading or decoding; it keeps its own
    UNREAD = 10  # error: it was to decode before its prompt was read: see prefill_all


ERRORS = tuple(ending for ending in Ending if ending > Ending.LENGTH)


@pytree
class Statistics(Pytree):
    """Counts per row since it was admitted, kept on the device: in one array, which a round writes
    in one launch. ``accepted`` also counts drafted tokens that a stop token or ``max_lens`` then
    cuts off.
    """

    counts: Array = array("batch", "depth")  # int32 [R, 2 + A]: rounds, drafted, accepted

    @property
    def rounds(self) -> Array:
        """int32 [R]"""
        return self.counts[:, 0]

    @property
    def drafted(self) -> Array:
        """int32 [R], nodes verified, roots not counted"""
        return self.counts[:, 1]

    @property
    def accepted(self) -> Array:
        """int32 [R, A], rounds that accepted >= d tokens"""
        return self.counts[:, 2:]


@pytree
class Pool(Pytree):
    """Cache memory with the lifetime of the engine; it has no batch axis.

    ``target`` holds the states of the target's layers, ``draft`` the drafter's, in the same pages.
    ``past`` is text of requests that ended, for a drafter that looks it up.
    """

    target: ModelState
    draft: Any
    page_size: int = static()
    num_pages: int = static()  # null pages included
    num_rows: int = static()  # most rows that it can serve
    past: PastText | None = None


@pytree
class Rows(Pytree):
    """State of R sequences. The first axis of every array is the row, so rows can be selected.

    The root, the last token of a sequence, is ``tokens[r, context_lens[r]]``: it is committed, but
    its keys and values are written by the next round. A row that is reading its prompt has no root.

    Of a row that is DONE ``ending`` says why: ``Ending(int(rows.ending[r])).name``.

    The pages of the first ``cached_lens`` tokens held them before the row was admitted; the row
    never writes to them. A row whose context is longer than ``context_capacity`` waits until it has
    more pages
    (see functional.assign_pages): a round may write ``scratch_slots`` past the context.
    """

    index: Array = array("batch")  # int32 [R], index of each row among its device's rows
    status: Array = array("batch")  # int32 [R] of Status
    ending: Array = array("batch")  # int32 [R] of Ending: why it is done
    tokens: Array = array("batch", "length")  # int32 [R, S]: prompt, then generated
    prompt_lens: Array = array("batch")  # int32 [R]
    context_lens: Array = array("batch")  # int32 [R], tokens whose KV is in the pool
    cached_lens: Array = array("batch")  # int32 [R], first tokens whose KV other rows may share
    max_lens: Array = array("batch")  # int32 [R], most tokens, prompt included
    context_capacity: Array = array("batch")  # int32 [R], longest context that the pages hold
    stop_tokens: Array = array("batch", "stops")  # int32 [R, E], padded with -1
    page_table: Array = array("batch", "table")  # int32 [R, M]
    sampling: Sampling
    draft: Any  # the drafter's arrays, each [R, ...], split as rows are
    stats: Statistics

    @property
    def undeclared_axes(self) -> tuple[str, ...]:
        """Axes of arrays that declare none: those in the state of a user's drafter."""
        return ("batch",)

    @property
    def active(self) -> Array:
        """Rows that are decoding, and have pages for another round: bool [R]."""
        return (self.status == Status.DECODING) & (self.context_lens <= self.context_capacity)

    @property
    def roots(self) -> Array:
        """Last committed token of each sequence: int32 [R]."""
        return jnp.take_along_axis(self.tokens, self.context_lens[:, None], axis=1)[:, 0]


@pytree
class EngineState(Pytree):
    """A pool and the rows that use it.

    Attributes:
      controls: bias and penalties of the R rows, which only ``admit`` changes; None if the state
        was made without them.
      capacity: the speculation config that the state was made for: the largest tree and the rules.
      drafter: the kind of drafter that the state was made for.
      dtype: of the weights that the state was made for.
    """

    pool: Pool
    rows: Rows
    controls: Controls | None = None
    capacity: SpeculationConfig = static()
    drafter: str = static()
    dtype: str = static()


@pytree
class PromptLogprobs(Pytree):
    """Log-probabilities of the prompt's tokens, under the model's raw logits.

    Entry ``t`` of a row belongs to the token after the ``t``-th that the call read; there is none
    for the first token of a prompt. Entries are valid where ``valid`` is true.
    """

    valid: Array = array("batch", "length")  # bool [B, T]
    logprobs: Array = array("batch", "length")  # float32 [B, T]
    top_tokens: Array | None = array("batch", "length", "alternatives")  # int32 [B, T, K]
    top_logprobs: Array | None = array("batch", "length", "alternatives")  # float32 [B, T, K]


@pytree
class RoundTrees(Pytree):
    """The trees that rounds verified, and the path that each accepted.

    C and A are those of Emitted, N is the most nodes of the call's trees. Node 0, the root, is the
    token before the round. Of a path the first ``accepted + 1`` nodes are valid, the root first.
    ``logprobs`` are of each node's token after its parent, under the model's raw logits; the root's
    has no meaning.
    """

    tokens: Array = array("rounds", "batch", "nodes")  # int32 [C, B, N]
    parents: Array = array("rounds", "batch", "nodes")  # int32 [C, B, N]; -1: root and padding
    num_nodes: Array = array("rounds", "batch")  # int32 [C, B]
    path: Array = array("rounds", "batch", "depth")  # int32 [C, B, A]
    logprobs: Array = array("rounds", "batch", "nodes")  # float32 [C, B, N]


@pytree
class Emitted(Pytree):
    """The output of one call of ``prefill`` or ``decode``.

    It is small and never donated, so the host can read it while the next call runs. C is the
    largest number of rounds of the call, A the most tokens that a round may commit, B the rows of
    the call, K the alternatives that were asked for, the likeliest first.
    """

    num_rounds: Array = array()  # int32 [], rounds that were run
    tokens: Array = array("rounds", "batch", "depth")  # int32 [C, B, A]
    counts: Array = array("rounds", "batch")  # int32 [C, B], number of tokens that were committed
    accepted: Array = array("rounds", "batch")  # int32 [C, B], drafted tokens accepted
    drafted: Array = array("rounds", "batch")  # int32 [C, B], drafted tokens verified
    status: Array = array("batch")  # int32 [B] of Status, after the call
    ending: Array = array("batch")  # int32 [B] of Ending
    logprobs: Array | None = array("rounds", "batch", "depth")  # float32 [C, B, A], if asked for
    hidden: Array | None = array("rounds", "batch", "depth", "whole_hidden")  # [C, B, A, n * H]
    top_tokens: Array | None = array("rounds", "batch", "depth", "alternatives")  # int32 [C,B,A,K]
    top_logprobs: Array | None = array("rounds", "batch", "depth", "alternatives")  # float32
    prompt: PromptLogprobs | None = None
    trees: RoundTrees | None = None
    confidence: Array | None = array("rounds", "batch", "depth", default=None)  # float32 [C,B,A-1]
    policy_logprobs: Array | None = array("rounds", "batch", "depth", default=None)  # float32
    heard: Array | None = array("batch", "two", default=None)  # int32 [B, 2], see PendingRows


def concatenated[T: Pytree](
    parts: Sequence[T], axis: str, concatenate: Callable[..., Any] = jnp.concatenate
) -> T:
    """Parts of one result, put together along a logical axis of its arrays. An array without that
    axis is the last part's. ``concatenate``: numpy's for arrays on the host."""
    *_, last = parts
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(type(last)):  # pyright: ignore[reportArgumentType]
        values, axes = [getattr(part, field.name) for part in parts], field.metadata.get("axes", ())
        if isinstance(values[0], Pytree):
            changes[field.name] = concatenated(values, axis, concatenate)
        elif axis in axes and values[0] is not None:
            changes[field.name] = concatenate(values, axis=axes.index(axis))
    return last.replace(**changes)


def empty_statistics(num_rows: int, max_depth: int) -> Statistics:
    """Statistics of ``num_rows`` rows that were just admitted."""
    return Statistics(counts=jnp.zeros((num_rows, 2 + max_depth + 1), jnp.int32))


def write_tokens(rows: Rows, new: Array, counts: Array) -> Array:
    """The token buffer with the first ``counts`` [R] of ``new`` [R, A] written after the root."""
    num_rows, width = new.shape
    offset = jnp.arange(width)
    position = rows.context_lens[:, None] + 1 + offset
    position = jnp.where(offset < counts[:, None], position, rows.tokens.shape[1])
    row = jnp.arange(num_rows)[:, None]
    return rows.tokens.at[row, position].set(new, mode="drop")
