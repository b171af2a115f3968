"""Decode: many rounds in one call, and the tokens that they emit."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.drafters.base import PendingRows, with_draft
from jaxspec.decoding.drafters.checks import checked_state
from jaxspec.decoding.functional.checks import (
    check_order,
    check_policy,
    check_rounds,
    check_sizes,
    check_state,
)
from jaxspec.decoding.functional.params import EngineParams, on_mesh, row_spec
from jaxspec.decoding.functional.record import Record, emitted_rounds, emitted_specs, empty_record
from jaxspec.decoding.functional.refusals import refuse_unread, rows_to_decode
from jaxspec.decoding.functional.subset import (
    choose_rows,
    listed_rows,
    local_rows,
    put_chosen,
    put_rows,
    take_rows,
)
from jaxspec.decoding.round import run_round
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import Emitted, EngineState, Status
from jaxspec.parallel.array_checks import Integers
from jaxspec.parallel.layout import Axes


def decode(
    params: EngineParams,
    state: EngineState,
    num_rounds: ArrayLike,
    rows: Integers | None = None,
    *,
    max_rounds: int | None = None,
    fixed: bool = False,
    shape: TreeShape | None = None,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    hidden: tuple[int, ...] = (),
    trees: bool = False,
    confidence: bool = False,
    policy_logprobs: bool = False,
    checked: bool = True,
) -> tuple[EngineState, Emitted]:
    """Run up to ``num_rounds`` rounds. Stops early when no row can go on.

    Rows must have been admitted, and their prompts read (see prefill_all). A row that is done stays
    as it is, and so does one that is still reading beside one that decodes. Why a row is done is
    ``state.rows.ending`` and ``emitted.ending``, an Ending: STOP after a stop token, LENGTH at its
    limit; any other says what went wrong (see state.Ending).

    Args:
      num_rounds: an int, at least 0, or a traced integer together with ``max_rounds``.
      rows: [B] rows to decode, as in prefill; None: all. The others stay unchanged.
      max_rounds: most rounds that the result holds; ``num_rounds`` by default. A traced
        ``num_rounds`` above it runs so many.
      fixed: run ``max_rounds`` rounds, whatever ``num_rounds`` is, even if no row can go on. On a
        GPU the host then need not wait for the launch: it decides after each round of any other
        call whether there is another.
      shape: shape of this call's draft trees, within ``params.speculation``; config.PLAIN drafts
        nothing. None: the largest, but PLAIN for more rows than ``params.most_drafting_rows``. In
        float32 the text does not depend on it.
      columns: width of the page table that the program sees, None: all of it. Rows that would
        outgrow it wait.
      greedy: compile a program without sampling. A row that samples ends as NOT_GREEDY.
      controls: compile a program that applies the rows' controls (see sampling.make_controls). In
        another call a row that has some ends as UNCONTROLLED.
      logprobs: emit the log-probability of every token under the model's raw logits.
      top_logprobs: the number of likeliest tokens to emit beside every token, with ``logprobs``.
      hidden: target hidden states to emit with every token, at the position it was sampled from:
        ``i`` is the residual stream after ``i`` layers, -1 the state after the final norm.
      trees: emit the tree of every round.
      confidence: emit how likely the drafter held each token of its chains; of other trees nothing.
      policy_logprobs: emit the log-probability of every token under the policy that samples it:
        after the row's temperature, top-k, top-p and min-p; 0 at temperature 0. Not with controls.
      checked: False compiles a program that ends no row as UNREAD, for a caller that knows that its
        rows have read their prompts.

    Returns the state, and what was emitted in each round.

    If none of the rows decodes and some are still reading, nothing can be generated. Of a known
    state that is an error; in a traced one the rows that are reading end as UNREAD.

    Raises ValueError for numbers of rounds that are no integers or below 0, or above
    ``max_rounds``, for a traced one without ``max_rounds``, for rows that the state lacks, that
    have no prompt or have not read it, for a shape larger than the engine's, for controls if the
    state has none or beside policy_logprobs, and for the confidence of a drafter without a
    confidence head.
    """
    check_state(params, state, controls=controls)
    check_policy(policy_logprobs, controls=controls)
    check_rounds(num_rounds, max_rounds)
    check_sizes(columns=columns)
    if max_rounds is None:
        max_rounds = int(np.asarray(num_rounds))
    rows = listed_rows(params, state, rows)
    num_rows = len(state.rows.status if rows is None else rows)
    options = RoundOptions(
        params.speculation_of(params.shape_for(num_rows) if shape is None else shape),
        params.kernels,
        columns=columns,
        greedy=greedy,
        controls=controls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        hidden=hidden,
        max_rounds=max(1, max_rounds),
        fixed=fixed,
        checked=checked,
        trees=trees,
        confidence=confidence,
        policy_logprobs=policy_logprobs,
    )
    options = params.checked_options(options)
    check_order(state, rows, decodes=max_rounds > 0)
    return decode_rows(params, state, options, jnp.asarray(num_rounds, jnp.int32), rows)


def decode_rows(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    limit: Array,
    rows: Array | None,
) -> tuple[EngineState, Emitted]:
    """Run up to ``limit`` (int32 []) rounds of rows [B], int32; None: all. See decode."""
    params.check(state, controls=options.controls)
    limit = jnp.minimum(limit, options.max_rounds)
    specs = P(), None if rows is None else row_spec(params)
    function, emitted = functools.partial(_decode, options), emitted_specs(params, options, state)
    return on_mesh(function, params, state, (limit, rows), specs, emitted)


def catch_up(params: EngineParams, state: EngineState, rows: Integers) -> EngineState:
    """Let the drafter read the last tokens of rows [B] that decode or are done.

    While a row decodes, its drafter reads the tokens of a round in the next one. Afterwards the
    drafter's cache, too, holds the whole context, and the row's full pages may be kept for others.
    Padding of ``rows`` is -1, and in a traced list any index outside 0 .. R - 1. Empty rows and
    those that read stay unchanged.
    """
    check_state(params, state)
    arguments = (listed_rows(params, state, rows),)
    return on_mesh(_catch_up, params, state, arguments, (row_spec(params),), None)


def _catch_up(params: EngineParams, state: EngineState, rows: Array) -> EngineState:
    all_rows = state.rows
    index = local_rows(rows, all_rows.status.shape[0], params.layout.batch)
    chosen = take_rows(all_rows, index).replace(index=index)
    behind = (chosen.status == Status.DECODING) | (chosen.status == Status.DONE)
    status = jnp.where(behind, Status.DECODING, Status.EMPTY).astype(jnp.int32)
    active = chosen.replace(status=status, context_capacity=chosen.context_lens)
    after = read_pending(params, params.round_options(), state.replace(rows=active))
    rows_after = put_rows(all_rows, index, chosen.replace(draft=after.rows.draft))
    return state.replace(pool=after.pool, rows=rows_after)


def max_pending_when_behind(
    params: EngineParams, options: RoundOptions, state: EngineState
) -> int | None:
    """Most pending tokens of the drafter, if it may have to catch up in this call (see
    _loop_catching_up); else None."""
    # A round of the deepest tree reads all that is pending, unless the head listens to more.
    reads_all = options.speculation.max_depth == state.capacity.max_depth
    if reads_all and not params.drafter.listens:
        return None
    return params.drafter.most_pending(state.capacity)


def read_pending(params: EngineParams, options: RoundOptions, state: EngineState) -> EngineState:
    """The state after the drafter has read all pending tokens."""
    with jax.named_scope("draft"):
        draft = params.drafter.catch_up(params.target, state, options)
        draft = checked_state(params.drafter, "catch_up", state, draft)
    return with_draft(state, draft)


class _Carry(NamedTuple):
    index: Array  # int32 [], rounds run so far
    state: EngineState
    record: Record


def _decode(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    limit: Array,
    rows: Array | None,
) -> tuple[EngineState, Emitted]:
    chosen, index = choose_rows(params, state, rows, options.columns)
    if options.checked:
        chosen = refuse_unread(params, chosen, limit)
    after, emitted = _run_rounds(params, options, chosen, limit)
    return put_chosen(params, state, rows, index, after, emitted)


def _run_rounds(
    params: EngineParams, options: RoundOptions, state: EngineState, limit: Array
) -> tuple[EngineState, Emitted]:
    state = rows_to_decode(options, state)
    max_pending = max_pending_when_behind(params, options, state)
    if options.fixed:
        loop = _fixed_loop(params, options, max_pending)
    elif max_pending is None:
        loop = _loop(params, options)
    else:
        loop = _loop_catching_up(params, options, max_pending)
    start = _Carry(jnp.int32(0), state, empty_record(params, options, state))
    num_rounds, state, record = loop(start, limit)
    return state, emitted_rounds(num_rounds, state, record.rounds)


Loop = Callable[[_Carry, Array], _Carry]


def _next_round(params: EngineParams, options: RoundOptions, carry: _Carry) -> _Carry:
    state, output = run_round(params.target, params.drafter, options, carry.state)
    return _Carry(carry.index + 1, state, carry.record.with_round(carry.index, output))


def _fixed_loop(params: EngineParams, options: RoundOptions, max_pending: int | None) -> Loop:
    """Runs ``max_rounds`` rounds, whatever the limit. ``max_pending``: see _loop_catching_up.

    If the drafter must catch up, it does so every few rounds. Their number divides that of all
    rounds, so that one loop of equal parts runs them all: the program has one copy of a round.
    """
    rounds, limit = options.max_rounds, options.max_rounds
    if max_pending is not None and options.speculation.is_plain:
        limit = min(rounds, max_pending - 1)
    rounds_in_part = max(count for count in range(1, limit + 1) if rounds % count == 0)

    def run_part(carry: _Carry) -> _Carry:
        if max_pending is not None:
            carry = carry._replace(state=read_pending(params, options, carry.state))
        return _repeat(functools.partial(_next_round, params, options), rounds_in_part, carry)

    return lambda carry, _: _repeat(run_part, rounds // rounds_in_part, carry)


def _repeat(body: Callable[[_Carry], _Carry], times: int, carry: _Carry) -> _Carry:
    if times == 1:
        return body(carry)
    return lax.fori_loop(0, times, lambda _, carry: body(carry), carry)


def _loop(params: EngineParams, options: RoundOptions) -> Loop:
    """Runs rounds up to a limit, or until no row can go on."""
    batch = params.layout.batch
    body = functools.partial(_next_round, params, options)

    def loop(carry: _Carry, limit: Array) -> _Carry:
        def unfinished(carry: _Carry) -> Array:
            active = jnp.any(carry.state.rows.active)
            if batch:
                active = lax.pmax(active.astype(jnp.int32), batch) > 0
            return (carry.index < limit) & active

        return lax.while_loop(unfinished, body, carry)

    return loop


def _loop_catching_up(params: EngineParams, options: RoundOptions, max_pending: int) -> Loop:
    """Does what _loop does, for calls whose trees are smaller than the engine's largest.

    The drafter can hold ``max_pending`` tokens (see Drafter.most_pending). A plain round adds a
    pending token, so the drafter catches up whenever a row's window is full. A round with a smaller
    tree reads all pending tokens but can hold fewer of them, so the drafter catches up once, before
    the first round, if more are pending.
    """
    inner, batch = _loop(params, options), params.layout.batch

    def caught_up(carry: _Carry) -> _Carry:
        return carry._replace(state=read_if_behind(params, options, carry.state, max_pending))

    def loop(carry: _Carry, limit: Array) -> _Carry:
        if not options.speculation.is_plain:
            return inner(caught_up(carry), limit)

        def body(carry: tuple[_Carry, Array]) -> tuple[_Carry, Array]:
            start = caught_up(carry[0])
            stop = jnp.minimum(start.index + _pending_left(start.state, max_pending, batch), limit)
            after = inner(start, stop)
            return after, after.index == stop

        def unfinished(carry: tuple[_Carry, Array]) -> Array:
            return carry[1] & (carry[0].index < limit)

        return lax.while_loop(unfinished, body, (carry, jnp.bool_(True)))[0]

    return loop


def read_if_behind(
    params: EngineParams, options: RoundOptions, state: EngineState, max_pending: int
) -> EngineState:
    """The state after the drafter caught up, if it must before a round with these options: see
    _loop_catching_up."""
    if not isinstance(state.rows.draft, PendingRows):
        return read_pending(params, options, state)
    shape, batch = options.speculation, params.layout.batch
    most, least = (max_pending, 1) if shape.is_plain else (shape.max_depth + 1, 0)
    # A loop of at most one iteration: the branches of lax.cond copy the caches.
    return lax.while_loop(
        lambda state: _pending_left(state, most, batch) < least,
        functools.partial(read_pending, params, options),
        state,
    )


def _pending_left(state: EngineState, most: int, batch: Axes) -> Array | int:
    """Tokens more that may be pending, of at most ``most``, before the drafter must catch up."""
    rows = state.rows
    if not isinstance(rows.draft, PendingRows):  # it has just caught up
        return most - 1
    least = jnp.min(jnp.where(rows.active, rows.draft.left(most), most))
    return lax.pmin(least, batch) if batch else least
