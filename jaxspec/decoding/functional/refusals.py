"""Rows that a call cannot serve: they end with an error, instead of going on in silence."""

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.decoding.functional.params import EngineParams
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import Ending, EngineState, Rows, Status


def refuse_rows(options: RoundOptions, state: EngineState, status: Status) -> EngineState:
    """The state with the rows of ``status`` DONE that this kind of call cannot serve.

    Rows that sample end a greedy call with NOT_GREEDY, rows with controls end one that applies none
    with UNCONTROLLED.
    """
    rows, controls = state.rows, state.controls
    if options.greedy:
        rows = _refuse(rows, (rows.status == status) & rows.sampling.drawn, Ending.NOT_GREEDY)
    if controls is not None and not options.controls:
        rows = _refuse(rows, (rows.status == status) & controls.used, Ending.UNCONTROLLED)
    return state.replace(rows=rows)


def _refuse(rows: Rows, refused: Array, ending: Ending) -> Rows:
    return rows.replace(
        status=jnp.where(refused, Status.DONE, rows.status),
        ending=jnp.where(refused, ending, rows.ending),
    )


def refuse_unread(params: EngineParams, state: EngineState, limit: Array) -> EngineState:
    """The state with its reading rows DONE as UNREAD, if none of its rows decodes."""
    rows, batch = state.rows, params.layout.batch
    decodes = jnp.any(rows.status == Status.DECODING)
    if batch:
        decodes = lax.pmax(decodes.astype(jnp.int32), batch) > 0
    unread = (rows.status == Status.READING) & ~decodes & (limit > 0)
    return state.replace(rows=_refuse(rows, unread, Ending.UNREAD))


def rows_to_decode(options: RoundOptions, state: EngineState) -> EngineState:
    """The state as the rounds of a call see it: without rows that this kind of call cannot serve,
    and without work for idle ones."""
    state = refuse_rows(options, state, Status.DECODING)
    if options.greedy:
        return state
    return state.replace(rows=_without_idle_sampling(state.rows))


def _without_idle_sampling(rows: Rows) -> Rows:
    """The rows, with temperature 0 for those that are done or empty: no work is done for them."""
    idle = (rows.status == Status.DONE) | (rows.status == Status.EMPTY)
    temperature = jnp.where(idle, 0.0, rows.sampling.temperature)
    return rows.replace(sampling=rows.sampling.replace(temperature=temperature))
