"""Some rows of a state: a call may run on a list of rows, and leave the others as they are."""

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.decoding.functional.checks import check_rows
from jaxspec.decoding.functional.params import EngineParams
from jaxspec.decoding.state import Emitted, Ending, EngineState, Rows
from jaxspec.parallel import Axes
from jaxspec.parallel.array_checks import Integers, known


def local_rows(rows: Array, num_rows: int, axes: Axes) -> Array:
    """Global row indices [B] as indices in this device's shard of ``num_rows`` rows; ``num_rows``
    for rows of other devices."""
    first = lax.axis_index(axes) * num_rows if axes else 0
    local = rows - first
    return jnp.where((local >= 0) & (local < num_rows), local, num_rows)


@overload
def listed_rows(params: EngineParams, state: EngineState, rows: None) -> None: ...
@overload
def listed_rows(params: EngineParams, state: EngineState, rows: Integers) -> Array: ...
def listed_rows(params: EngineParams, state: EngineState, rows: Integers | None) -> Array | None:
    """A list of rows [B] as int32; None: all rows, None.

    Raises ValueError for what check_rows refuses, and for a list whose shares do not belong to
    their devices.
    """
    if rows is None:
        return None
    num_rows = state.rows.status.shape[0]
    array = check_rows(rows, num_rows)
    listed = known(array)
    if listed is not None:
        _check_split(params, listed, num_rows)
    return jnp.asarray(array, jnp.int32)


def _check_split(params: EngineParams, listed: np.ndarray, num_rows: int) -> None:
    shards = params.data_parallel
    if listed.size % shards:
        raise ValueError(f"{listed.size} rows cannot be split over {shards} data shards")
    device = np.repeat(np.arange(shards), listed.size // shards)
    inside = (listed >= 0) & (listed < num_rows)
    if (listed // (num_rows // shards) != device)[inside].any():
        raise ValueError(
            f"rows {listed.tolist()}: each of {shards} devices has its own "
            f"{num_rows // shards} rows only, so each share of the list must name those"
        )


def choose_rows(
    params: EngineParams, state: EngineState, rows: Array | None, columns: int | None = None
) -> tuple[EngineState, Array | None]:
    """The state with global rows [B] only, and their local indices; None: all rows, None.

    Args:
      columns: width of their page tables, None: all of it. Rows that would outgrow it wait.
    """
    if rows is None:
        return state.replace(rows=_narrow(state, columns)), None
    all_rows = state.rows
    index = local_rows(rows, all_rows.status.shape[0], params.layout.batch)
    chosen = state.replace(
        rows=take_rows(all_rows, index).replace(index=index),
        controls=take_rows(state.controls, index),
    )
    return chosen.replace(rows=_narrow(chosen, columns)), index


def put_chosen(
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
    index: Array | None,
    chosen: EngineState,
    emitted: Emitted,
) -> tuple[EngineState, Emitted]:
    """``state`` after a call on the rows of choose_rows, and what they emitted; rows of other
    devices are emitted as MISPLACED."""
    after, num_rows = put_back(state, index, chosen), state.rows.status.shape[0]
    if rows is None:
        return after, emitted
    elsewhere = (rows >= 0) & (rows < num_rows * params.data_parallel) & (index == num_rows)
    ending = jnp.where(elsewhere, Ending.MISPLACED, emitted.ending)
    return after, emitted.replace(ending=ending)


def put_back(state: EngineState, index: Array | None, chosen: EngineState) -> EngineState:
    """``state`` after a call on the rows of choose_rows."""
    all_rows = state.rows
    if index is None:
        return chosen.replace(rows=_widened(all_rows, chosen.rows))
    changed = _widened(take_rows(all_rows, index), chosen.rows)
    return chosen.replace(rows=put_rows(all_rows, index, changed), controls=state.controls)


def _narrow(state: EngineState, columns: int | None) -> Rows:
    """The rows with the first ``columns`` of their page tables, and as many tokens."""
    rows = state.rows
    if columns is None or columns >= rows.page_table.shape[1]:
        return rows
    slots = columns * state.pool.page_size
    return rows.replace(
        page_table=rows.page_table[:, :columns],
        tokens=rows.tokens[:, :slots],
        # One less, because the token after the last slot must fit ``tokens``.
        context_capacity=jnp.minimum(
            rows.context_capacity, slots - state.capacity.scratch_slots - 1
        ),
    )


def _widened(before: Rows, after: Rows) -> Rows:
    """``after``, with the columns and the capacity of ``before`` that _narrow cut off."""
    if after.page_table.shape == before.page_table.shape:
        return after
    rest = before.tokens[:, after.tokens.shape[1] :]
    return after.replace(
        page_table=before.page_table,
        tokens=jnp.concatenate([after.tokens, rest], axis=1),
        context_capacity=before.context_capacity,
    )


def take_rows[T](tree: T, index: Array) -> T:
    """Rows ``index`` [B] of every array [R, ...]; zeros for indices out of range."""
    return jax.tree.map(lambda x: x.at[index].get(mode="fill", fill_value=0), tree)


def put_rows[T](tree: T, index: Array, rows: T) -> T:
    """Every array [R, ...] with rows ``index`` [B] replaced; indices past the end are dropped."""
    return jax.tree.map(lambda x, new: x.at[index].set(new, mode="drop"), tree, rows)
