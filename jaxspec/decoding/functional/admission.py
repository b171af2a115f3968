"""Admits prompts to rows. Nothing here runs a model."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxspec.decoding.drafters import checks
from jaxspec.decoding.functional.checks import check_admission, check_state
from jaxspec.decoding.functional.params import EngineParams, on_mesh
from jaxspec.decoding.functional.rows import empty_rows, held_slots, new_controls, padded_controls
from jaxspec.decoding.functional.subset import local_rows, put_rows, take_rows
from jaxspec.decoding.sampling import Controls, Sampling, make_sampling
from jaxspec.decoding.state import Ending, EngineState, Status
from jaxspec.parallel import Layout, partition_specs
from jaxspec.parallel.array_checks import ArrayProblems, Integers, as_int32, integers


def admit(
    params: EngineParams,
    state: EngineState,
    rows: Integers,
    prompts: Integers,
    prompt_lens: Integers,
    *,
    sampling: Sampling | None = None,
    controls: Controls | None = None,
    max_lens: Integers | None = None,
    stop_token_ids: Integers = (),
    page_table: Array | None = None,
    cached_lens: Integers | None = None,
    may_wait: bool = False,
    checked: bool = True,
) -> EngineState:
    """Assign prompts to rows; ``prefill_all`` or ``prefill`` then reads them.

    No model runs. Pages stay unchanged; states with an entry per row are cleared.

    Args:
      rows: [B] distinct indices of rows that are empty or done; -1, and in a traced list any index
        outside 0 .. R - 1, is padding.
      prompts: integers [B, T], of which the first ``prompt_lens`` [B] are the prompt.
      prompt_lens: integers [B], 1 to T, and less than the state's ``max_length``.
      sampling: sampling of the B rows, from make_sampling; greedy by default.
      controls: bias and penalties of the B rows, from make_controls; none by default.
      max_lens: [B] most tokens of each row, prompt included; by default the length of the token
        buffer.
      stop_token_ids: ids that end a row: a tuple for all rows, or [B, E] padded with -1. By default
        none does: give ``params.target.config.stop_token_ids`` to end where the model does.
      page_table: [B, M] pages of each row, padded with the null page 0; by default the row's
        current pages.
      cached_lens: [B] first tokens of each prompt whose KV the row's pages already hold, target's
        and drafter's; 0 by default. They are not written again. The drafter's
        ``num_reread_tokens`` last ones are still read, for the hidden states that it needs, so all
        of a prompt may be cached.
      may_wait: a row's limit may need more pages than it has yet: it waits for them as it decodes
        (see assign_pages).
      checked: False compiles a program that ends no row as BAD_TOKEN or BUSY, for a caller that
        knows its tokens and its rows.

    A row whose prompt is as long as its limit still gets the token after the prompt. Values that
    are known are checked here; of traced ones a row is DONE at once with an ending (state.Ending):
    TOO_LONG if its prompt or limit does not fit its pages, the token buffer or ``prompts``, or if
    its pages are not in the pool; BAD_TOKEN for a token id outside the vocabulary; BUSY if it was
    reading or decoding, or is listed twice: it keeps the tokens that it had.

    Raises ValueError that lists what does not fit: shapes and dtypes, and of known values rows that
    the state lacks or that are busy, lengths and limits that do not fit, and token ids outside the
    vocabulary; for controls if the state was made without them.
    """
    check_state(params, state, controls=controls is not None)
    rows = integers("rows", rows, "[B]")
    batch, length = rows.shape[0], state.rows.tokens.shape[1]
    arrived = _arrived(prompts, prompt_lens, max_lens, cached_lens, page_table)
    width = arrived["prompts"].shape[1]
    if width > length:
        raise ValueError(
            f"a prompt of {width} tokens is longer than a row ({length}): make the state with a "
            "larger max_length, or give fewer columns"
        )
    stops = _stop_table(stop_token_ids, batch, state.rows.stop_tokens.shape[1])
    sampling = make_sampling(batch) if sampling is None else sampling
    check_admission(params, state, rows, arrived | {"stop_token_ids": stops, "sampling": sampling})
    none = {"max_lens": jnp.full(batch, length), "cached_lens": jnp.zeros(batch, jnp.int32)}
    arrived = none | {name: x for name, x in arrived.items() if x is not None}
    arrived = {name: jnp.asarray(x, jnp.int32) for name, x in arrived.items()}
    arrived |= {"stop_token_ids": stops, "sampling": sampling}
    rows = jnp.asarray(rows, jnp.int32)
    if controls is not None:
        controls = padded_controls(params, controls, batch)
    # Every device gets all arriving rows, but only its own part of the vocabulary.
    controls_spec = partition_specs(controls, Layout(vocab=params.layout.vocab))
    arguments, specs = (rows, arrived, controls), (P(), P(), controls_spec)
    function = functools.partial(_admit, may_wait, checked)
    return on_mesh(function, params, state, arguments, specs, None)


def _arrived(
    prompts: Integers,
    prompt_lens: Integers,
    max_lens: Integers | None,
    cached_lens: Integers | None,
    page_table: Array | None,
) -> dict[str, Any]:
    """The arrays by name, not yet of 32 bits: None for those that are not given."""
    problems = ArrayProblems()
    given = {
        "prompts": (prompts, "[B, T]"),
        "prompt_lens": (prompt_lens, "[B]"),
        "max_lens": (max_lens, "[B]"),
        "cached_lens": (cached_lens, "[B]"),
        "page_table": (page_table, "[B, M]"),
    }
    arrays = {
        name: None if value is None else problems.integers(name, value, shape)
        for name, (value, shape) in given.items()
    }
    problems.raise_all()
    return arrays


def _stop_table(ids: Integers, batch: int, width: int) -> Array:
    """Stop tokens [B, E]; see admit."""
    if ids is None:
        raise ValueError("stop_token_ids must be token ids, not None: give () for none")
    is_list = isinstance(ids, list | tuple)
    flat = not any(map(np.ndim, ids)) if is_list else np.ndim(ids) == 1
    table = as_int32("stop_token_ids", ids, "[E]" if flat else "[B, E]")
    if flat:
        table = jnp.broadcast_to(table, (batch, table.shape[0]))
    if table.shape[1] > width:
        raise ValueError(
            f"{table.shape[1]} stop tokens, the state holds {width} of a row: make it with a "
            "larger max_stops"
        )
    return jnp.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)


def _admit(
    may_wait: bool,
    checked: bool,
    params: EngineParams,
    state: EngineState,
    rows: Array,
    arrived: dict[str, Any],
    controls: Controls | None,
) -> EngineState:
    before = state.rows
    index = local_rows(rows, before.status.shape[0], params.layout.batch)
    table = arrived.get("page_table")
    table = take_rows(before.page_table, index) if table is None else table
    length, width = before.tokens.shape[1], arrived["prompts"].shape[1]
    cached = arrived["cached_lens"]
    fits = _fit(params, state, arrived, table, may_wait)
    fault, busy = Ending.TOO_LONG, None
    if checked:
        bad = _have_bad_tokens(arrived, params)
        fault, fits = jnp.where(bad, Ending.BAD_TOKEN, fault), fits & ~bad
        index, busy = _without_busy(before.status, index)
    empty = empty_rows(params, index, table, length, before.stop_tokens.shape[1])
    new = empty.replace(
        status=jnp.where(fits, Status.READING, Status.DONE).astype(jnp.int32),
        ending=jnp.where(fits, Ending.NONE, fault).astype(jnp.int32),
        tokens=jnp.pad(arrived["prompts"], ((0, 0), (0, length - width))),
        prompt_lens=arrived["prompt_lens"],
        context_lens=jnp.maximum(cached - params.drafter.num_reread_tokens, 0),
        cached_lens=cached,
        max_lens=arrived["max_lens"],
        context_capacity=held_slots(table, state.pool.page_size) - params.speculation.scratch_slots,
        stop_tokens=arrived["stop_token_ids"],
        sampling=arrived["sampling"],
    )
    pool = state.pool.replace(
        target=state.pool.target.reset(index),
        draft=checks.reset_pool(params.drafter, state, index),
    )
    if state.controls is not None:
        controls = new_controls(params, rows.shape[0]) if controls is None else controls
        controls = put_rows(state.controls, index, controls)
    rows_after = put_rows(before, index, new)
    if busy is not None:
        rows_after = rows_after.replace(
            status=rows_after.status.at[busy].set(Status.DONE, mode="drop"),
            ending=rows_after.ending.at[busy].set(Ending.BUSY, mode="drop"),
        )
    return state.replace(pool=pool, rows=rows_after, controls=controls)


def _fit(
    params: EngineParams,
    state: EngineState,
    arrived: dict[str, Any],
    table: Array,
    may_wait: bool,
) -> Array:
    """Whether prompts and limits fit the token buffer, and the pages of ``table`` [B, M]: bool
    [B]."""
    lens, max_lens = arrived["prompt_lens"], arrived["max_lens"]
    length, width = state.rows.tokens.shape[1], arrived["prompts"].shape[1]
    held = held_slots(table, state.pool.page_size)
    local_pages = state.pool.num_pages // params.data_parallel
    fits = (lens >= 1) & (lens <= width) & (lens < length) & (max_lens <= length)
    fits &= jnp.all((table >= 0) & (table < local_pages), axis=1)
    needed = table.shape[1] * state.pool.page_size if may_wait else held
    scratch = params.speculation.scratch_slots
    return fits & (lens <= held) & (arrived["cached_lens"] <= lens) & (max_lens + scratch <= needed)


def _have_bad_tokens(arrived: dict[str, Any], params: EngineParams) -> Array:
    """Prompts with a token outside the vocabulary: bool [B]."""
    prompts, vocab = arrived["prompts"], params.target.config.vocab_size
    inside = jnp.arange(prompts.shape[1]) < arrived["prompt_lens"][:, None]
    return jnp.any(inside & ((prompts < 0) | (prompts >= vocab)), axis=1)


def _without_busy(status: Array, index: Array) -> tuple[Array, Array]:
    """Rows ``index`` [B] that prompts may be admitted to, and those that are reading, decoding or
    listed before; the other entries of both are past the last row."""
    before = take_rows(status, index)
    again = jnp.any(jnp.tril(index[:, None] == index, -1), axis=1)
    busy = again | (before == Status.READING) | (before == Status.DECODING)
    past = status.shape[0]
    return jnp.where(busy, past, index), jnp.where(busy, index, past)
