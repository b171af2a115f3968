"""Everything that changes while text is generated, as one frozen pytree: a pool and rows."""

import enum
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.cache import ModelState
from jaxspec.config import SpeculationConfig
from jaxspec.pytree import Pytree, array, pytree, static
from jaxspec.sampling import Sampling


class Status(enum.IntEnum):
    """What a row is doing."""

    EMPTY = 0
    READING = 1  # its prompt
    DECODING = 2
    DONE = 3


class Ending(enum.IntEnum):
    """Why a row is done."""

    NONE = 0  # it is not
    STOP = 1  # a stop token, which is its last token
    LENGTH = 2  # it has as many tokens as it may have
    NOT_FINITE = 3  # the model's logits were NaN or infinite: an error
    TOO_LONG = 4  # its prompt or its limit does not fit its pages or its token buffer: an error
    NOT_GREEDY = 5  # it samples, in a call for greedy rows alone: an error
    MISPLACED = 6  # emitted only: listed for a device that has other rows, and left as it is


ERRORS = (Ending.NOT_FINITE, Ending.TOO_LONG, Ending.NOT_GREEDY, Ending.MISPLACED)


@pytree
class Statistics(Pytree):
    """Counts a row since it was admitted; kept on the device, read when wanted.

    ``accepted`` counts drafted tokens before a stop token or ``max_lens`` cuts them.
    """

    rounds: Array = array("batch")  # int32 [R]
    drafted: Array = array("batch")  # int32 [R], nodes verified, roots not counted
    accepted: Array = array("batch", "depth")  # int32 [R, A], rounds that accepted >= d tokens


@pytree
class Pool(Pytree):
    """Memory that lives as long as the engine: no batch axis.

    ``target`` holds what the target's layers keep, ``draft`` what the drafter keeps in the same
    pages.
    """

    target: ModelState
    draft: Any
    page_size: int = static()
    num_pages: int = static()  # null pages included
    num_rows: int = static()  # most rows that can lie in it


@pytree
class Rows(Pytree):
    """State of R sequences. Every array has a row axis first, so rows can be taken and put back.

    The root, a sequence's last token, is ``tokens[r, context_lens[r]]``: committed, but its keys
    and values are written by the next round. While its prompt is being read a row has no root.
    """

    index: Array = array("batch")  # int32 [R], each row's own place among its device's rows
    status: Array = array("batch")  # int32 [R] of Status
    ending: Array = array("batch")  # int32 [R] of Ending
    tokens: Array = array("batch", "length")  # int32 [R, S]: prompt, then generated
    prompt_lens: Array = array("batch")  # int32 [R]
    context_lens: Array = array("batch")  # int32 [R], tokens whose KV is in the pool
    max_lens: Array = array("batch")  # int32 [R], most tokens, prompt included
    stop_tokens: Array = array("batch", "stops")  # int32 [R, E], padded with -1
    page_table: Array = array("batch", "table")  # int32 [R, M]
    sampling: Sampling
    draft: Any  # the drafter's own, [R, ...] each, split as rows are
    stats: Statistics

    @property
    def undeclared_axes(self) -> tuple[str, ...]:
        """Of arrays that declare no axes: a drafter of one's own may keep any."""
        return ("batch",)

    @property
    def active(self) -> Array:
        """Rows that decode: bool [R]."""
        return self.status == Status.DECODING

    @property
    def roots(self) -> Array:
        """Last committed token of each sequence: int32 [R]."""
        return jnp.take_along_axis(self.tokens, self.context_lens[:, None], axis=1)[:, 0]


@pytree
class EngineState(Pytree):
    """A pool and the rows that lie in it.

    Attributes:
      capacity: the largest tree and the rules that the state was made for.
      drafter: the kind of drafter that it was made for.
    """

    pool: Pool
    rows: Rows
    capacity: SpeculationConfig = static()
    drafter: str = static()


@pytree
class Emitted(Pytree):
    """What one call of ``prefill`` or ``decode`` added: small, and never donated, so the host can
    read it while the next call runs.

    C is the most rounds of the call, A the most tokens a round may commit, B the rows of the call.
    """

    num_rounds: Array = array()  # int32 [], rounds that ran
    tokens: Array = array("rounds", "batch", "depth")  # int32 [C, B, A]
    counts: Array = array("rounds", "batch")  # int32 [C, B], tokens committed of each
    accepted: Array = array("rounds", "batch")  # int32 [C, B], drafted tokens accepted
    drafted: Array = array("rounds", "batch")  # int32 [C, B], drafted tokens verified
    status: Array = array("batch")  # int32 [B] of Status, after the call
    ending: Array = array("batch")  # int32 [B] of Ending
    logprobs: Array | None = array("rounds", "batch", "depth")  # float32 [C, B, A], where asked for
    hidden: Array | None = array("rounds", "batch", "depth", "hidden")  # [C, B, A, n * H]


def empty_statistics(num_rows: int, max_depth: int) -> Statistics:
    return Statistics(
        rounds=jnp.zeros(num_rows, jnp.int32),
        drafted=jnp.zeros(num_rows, jnp.int32),
        accepted=jnp.zeros((num_rows, max_depth + 1), jnp.int32),
    )


def write_tokens(rows: Rows, new: Array, counts: Array) -> Array:
    """Token buffer with ``new`` [R, A] put after the root, the first ``counts`` [R] of each."""
    num_rows, width = new.shape
    offset = jnp.arange(width)
    position = rows.context_lens[:, None] + 1 + offset
    position = jnp.where(offset < counts[:, None], position, rows.tokens.shape[1])
    row = jnp.arange(num_rows)[:, None]
    return rows.tokens.at[row, position].set(new, mode="drop")
