"""What the pool holds: copies pages, saves rows to host memory and brings them back, or only their
own states; adds past texts."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxspec.cache import ModelState
from jaxspec.decoding.functional.checks import check_pages, check_rows, check_state, check_table
from jaxspec.decoding.functional.params import EngineParams, on_mesh, row_spec, with_found_specs
from jaxspec.decoding.functional.rows import held_slots
from jaxspec.decoding.functional.subset import put_rows, take_rows
from jaxspec.decoding.state import EngineState, Rows
from jaxspec.parallel import partition_specs
from jaxspec.parallel.array_checks import Integers, as_int32
from jaxspec.parallel.pytree import Pytree, pytree


@pytree
class SavedRow(Pytree):
    """A row and what its pages hold, in no pool: it may be moved to host memory."""

    row: Rows  # R = 1
    target: ModelState
    draft: Any


def copy_pages(
    params: EngineParams, state: EngineState, source: Integers, destination: Integers
) -> EngineState:
    """Copy pages ``source`` [n] to pages ``destination`` [n], in every layer of target and drafter.

    Under data parallelism the lists are split evenly over the devices, and name pages of each. The
    null page as a destination is padding.
    """
    check_state(params, state)
    spec = row_spec(params)
    lists = as_int32("source", source, "[n]"), as_int32("destination", destination, "[n]")
    if lists[0].shape != lists[1].shape:
        raise ValueError(
            f"source has {len(lists[0])} pages, destination {len(lists[1])}: give one for each"
        )
    check_pages(params, state, source=lists[0], destination=lists[1])
    return on_mesh(_copy_pages, params, state, lists, (spec, spec), None)


def _copy_pages(
    params: EngineParams, state: EngineState, source: Array, destination: Array
) -> EngineState:
    pool, draft = state.pool, state.pool.draft
    target = pool.target.with_copies(source, destination)
    if isinstance(draft, ModelState):
        draft = draft.with_copies(source, destination)
    return state.replace(pool=pool.replace(target=target, draft=draft))


def save_row(
    params: EngineParams, state: EngineState, row: Integers, pages: Integers
) -> tuple[EngineState, SavedRow]:
    """The state as it is, and a copy of one row (an index [1]) with the contents of its pages [n].

    ``pages`` may be padded with the null page. restore_row continues the row, exactly. A row with
    many pages may be saved in parts: then each has a copy of the row beside its pages.

    Raises ValueError under data parallelism.
    """
    check_state(params, state)
    _check_one_shard(params)
    index, listed = as_int32("row", row, "[n]"), as_int32("pages", pages, "[n]")
    check_rows(index, state.rows.status.shape[0])
    check_pages(params, state, pages=listed)
    return with_found_specs(_save_row, params, state, (index, listed), (P(), P()))


def _save_row(
    params: EngineParams, state: EngineState, row: Array, pages: Array
) -> tuple[EngineState, SavedRow]:
    pool = state.pool
    draft = pool.draft.take(pages, row) if isinstance(pool.draft, ModelState) else None
    saved = SavedRow(
        row=take_rows(state.rows, row), target=pool.target.take(pages, row), draft=draft
    )
    return state, saved


def restore_row(
    params: EngineParams,
    state: EngineState,
    saved: SavedRow,
    row: Integers,
    pages: Integers,
    page_table: Array,
) -> EngineState:
    """Put a saved row back, as row ``row`` [1] with other pages. Of several parts, put all back.

    Args:
      pages: [n] pages for the contents of those that were saved, in the same order; the null page
        for those that are not needed.
      page_table: [1, M] the row's pages from now on.
    """
    check_state(params, state)
    _check_one_shard(params)
    arguments = (
        saved,
        as_int32("row", row, "[n]"),
        as_int32("pages", pages, "[n]"),
        as_int32("page_table", page_table, "[1, M]"),
    )
    check_rows(arguments[1], state.rows.status.shape[0])
    check_pages(params, state, pages=arguments[2])
    check_table(params, state, arguments[3], 1)
    specs = partition_specs(saved, params.layout), P(), P(), P()
    return on_mesh(_restore_row, params, state, arguments, specs, None)


def _restore_row(
    params: EngineParams,
    state: EngineState,
    saved: SavedRow,
    row: Array,
    pages: Array,
    page_table: Array,
) -> EngineState:
    pool, draft = state.pool, state.pool.draft
    if isinstance(draft, ModelState):
        draft = draft.put(saved.draft, pages, row)
    restored = saved.row.replace(
        index=row,
        page_table=page_table,
        context_capacity=held_slots(page_table, pool.page_size) - params.speculation.scratch_slots,
    )
    return state.replace(
        pool=pool.replace(target=pool.target.put(saved.target, pages, row), draft=draft),
        rows=put_rows(state.rows, row, restored),
    )


def take_states(
    params: EngineParams, state: EngineState, row: Integers
) -> tuple[EngineState, ModelState]:
    """The state as it is, and a copy of what the target's layers keep of a row (an index [1])
    outside of pages. Drafters keep nothing there: see LayerState.overwritable.

    Raises ValueError under data parallelism.
    """
    check_state(params, state)
    _check_one_shard(params)
    index = as_int32("row", row, "[n]")

    def take(_: EngineParams, state: EngineState, row: Array) -> tuple[EngineState, ModelState]:
        return state, state.pool.target.take(jnp.zeros(0, jnp.int32), row)

    return with_found_specs(take, params, state, (index,), (P(),))


def put_states(
    params: EngineParams, state: EngineState, saved: ModelState, row: Integers
) -> EngineState:
    """Give a row (an index [1]) what take_states copied: the row is to read what followed then."""
    check_state(params, state)
    _check_one_shard(params)
    arguments = saved, as_int32("row", row, "[n]")
    specs = partition_specs(saved, params.layout), P()

    def put(_: EngineParams, state: EngineState, saved: ModelState, row: Array) -> EngineState:
        target = state.pool.target.put(saved, jnp.zeros(0, jnp.int32), row)
        return state.replace(pool=state.pool.replace(target=target))

    return on_mesh(put, params, state, arguments, specs, None)


def remember(
    params: EngineParams, state: EngineState, tokens: Integers, count: ArrayLike
) -> EngineState:
    """Add the first ``count`` of ``tokens`` [n] to the past text that the drafter looks up.

    A text may come in several parts, of at most the ring's size each; its last token must be
    past_text.GAP. No rounds may run before that. Every device gets all of it.

    Raises ValueError if the drafter looks up no past text.
    """
    check_state(params, state)
    if state.pool.past is None:
        raise ValueError("the drafter looks up no past text: see SuffixDrafter.past")
    arguments = as_int32("tokens", tokens, "[n]"), as_int32("count", count, "[]")

    def add(_: EngineParams, state: EngineState, tokens: Array, count: Array) -> EngineState:
        pool = state.pool
        assert pool.past is not None
        return state.replace(pool=pool.replace(past=pool.past.with_more(tokens, count)))

    return on_mesh(add, params, state, arguments, (P(), P()), None)


def _check_one_shard(params: EngineParams) -> None:
    if params.data_parallel > 1:
        raise ValueError(
            "rows that are split over devices cannot be saved: preempt them by recomputation"
        )
