"""Creates states, and admits and releases rows. Nothing here runs a model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxspec.cache import Geometry, pages_for, sequential_page_table
from jaxspec.functional.params import EngineParams, Integers, on_mesh
from jaxspec.functional.subset import local_rows, put_rows, take_rows
from jaxspec.parallel import (
    Layout,
    check_divides,
    named_shardings,
    partition_specs,
)
from jaxspec.past_text import empty_past
from jaxspec.sampling import Controls, Sampling, make_controls, make_sampling
from jaxspec.speculation.drafters import checks
from jaxspec.state import Ending, EngineState, Pool, Rows, Status, empty_statistics


def init_state(
    params: EngineParams,
    num_rows: int,
    max_length: int,
    *,
    page_size: int = 16,
    page_table: Array | None = None,
    num_pages: int | None = None,
    max_stops: int = 4,
    controls: bool = False,
) -> EngineState:
    """A state of ``num_rows`` empty rows of at most ``max_length`` tokens each.

    Args:
      page_table: [R, M] pages of each row. By default each row has its own consecutive pages, with
        room for ``max_length`` tokens and the tree after them.
      num_pages: total number of pages, null pages included; required with ``page_table``.
      max_stops: most stop tokens of a row.
      controls: make room for bias and penalties: 4 V bytes a row.

    Raises ValueError if the rows cannot be split over the mesh, the table is too narrow, or the
    tree is too deep for a sliding window.
    """
    if (page_table is None) != (num_pages is None):
        raise ValueError("give page_table and num_pages together, or neither")
    needed = pages_for(max_length + params.speculation.scratch_slots, page_size)
    if num_pages is None:
        num_pages = num_rows * needed + params.data_parallel
    pool = init_pool(params, num_pages, page_size, num_rows)
    return init_rows(
        params, pool, num_rows, max_length, page_table, max_stops=max_stops, controls=controls
    )


def init_pool(params: EngineParams, num_pages: int, page_size: int, num_rows: int) -> Pool:
    """Empty cache memory.

    ``num_pages`` includes the null pages, one for each device that rows are split over. The pool
    can serve any number of rows up to ``num_rows``, one set of rows at a time.

    Raises ValueError for pages that cannot be split over the devices of a sequence, and if they
    are, for a verify width: sums over devices depend on the order of slots. Also for a drafter that
    looks up past outputs under another rule than "match": an output of a seed was drawn with the
    numbers that a later request of this seed draws, so a draft from it would not be independent.
    """
    checks.check_drafter(params.drafter)
    check_divides("page_size", page_size, params.sequence_parallel)
    if params.sequence_parallel > 1 and params.speculation.verify_width is not None:
        raise ValueError("verify_width needs whole sequences on a device: take sp 1, or leave it")
    if params.drafter.past_tokens and params.speculation.acceptance != "match":
        raise ValueError(
            'drafting from past outputs needs the acceptance rule "match": take it, or suffix '
            "without a number"
        )
    params.target.config.check_tree_depth(params.speculation.max_depth)
    geometry = Geometry(num_pages, page_size, num_rows, params.mesh)
    return Pool(
        target=params.target.init_state(geometry),
        draft=params.drafter.init_pool(geometry),
        page_size=page_size,
        num_pages=num_pages,
        num_rows=num_rows,
        past=empty_past(params.drafter.past_tokens),
    )


def init_rows(
    params: EngineParams,
    pool: Pool,
    num_rows: int,
    max_length: int,
    page_table: Array | None = None,
    *,
    max_stops: int = 4,
    controls: bool = False,
) -> EngineState:
    """A state of empty rows and a given pool; see init_state.

    Raises ValueError if the rows do not fit the pool or the mesh, and for more positions than the
    model has.
    """
    shards, page_size = params.data_parallel, pool.page_size
    if num_rows < 1 or num_rows % shards:
        raise ValueError(f"{num_rows} rows cannot be split over {shards} data shards")
    params.target.config.check_length(max_length)
    if num_rows > pool.num_rows:
        raise ValueError(f"{num_rows} rows do not fit a pool that was made for {pool.num_rows}")
    needed = pages_for(max_length + params.speculation.scratch_slots, page_size)
    if page_table is None:
        page_table = sequential_page_table(num_rows, needed, shards)
        if 1 + num_rows // shards * needed > pool.num_pages // shards:
            raise ValueError(
                f"{num_rows} rows of {needed} pages and {shards} null pages do not fit a pool of "
                f"{pool.num_pages}: give a page_table of your own, or a larger pool"
            )
    if page_table.shape[1] < needed:
        raise ValueError(
            f"{max_length} tokens and {params.speculation.scratch_slots} tree slots need {needed} "
            f"pages of {page_size}, the page table has {page_table.shape[1]}"
        )
    index = jnp.arange(num_rows, dtype=jnp.int32) % (num_rows // shards)
    rows = _empty_rows(params, index, page_table, max_length, max(1, max_stops))
    if params.mesh is not None:
        shardings = named_shardings(params.mesh, rows, params.layout)
        rows = jax.tree.map(jax.device_put, rows, shardings)
    return EngineState(
        pool=pool,
        rows=rows,
        controls=no_controls(params, num_rows) if controls else None,
        capacity=params.speculation,
        drafter=params.drafter_name,
    )


def no_controls(params: EngineParams, num_rows: int) -> Controls:
    """Controls of a state's rows that change nothing, on the devices of the weights."""
    controls = _no_controls(params, num_rows)
    if params.mesh is None:
        return controls
    shardings = named_shardings(params.mesh, controls, params.layout)
    return jax.tree.map(jax.device_put, controls, shardings)


def _no_controls(params: EngineParams, num_rows: int) -> Controls:
    # A separate array for each field: a shared one would be donated twice.
    return jax.tree.map(jnp.array, make_controls(num_rows, params.target.local_vocab))


def _empty_rows(
    params: EngineParams, index: Array, page_table: Array, max_length: int, max_stops: int
) -> Rows:
    # A separate array for each field: a shared one would be donated twice.
    size = index.shape[0]
    status, ending, prompt_lens, context_lens, cached_lens, max_lens, room = (
        jnp.zeros(size, jnp.int32) for _ in range(7)
    )
    return Rows(
        index=index,
        status=status,
        ending=ending,
        tokens=jnp.zeros((size, max_length), jnp.int32),
        prompt_lens=prompt_lens,
        context_lens=context_lens,
        cached_lens=cached_lens,
        max_lens=max_lens,
        room=room,
        stop_tokens=jnp.full((size, max_stops), -1, jnp.int32),
        page_table=jnp.array(page_table, jnp.int32),
        sampling=jax.tree.map(jnp.array, make_sampling(size)),
        draft=checks.new_rows(params.drafter, size, params.target, params.speculation),
        stats=empty_statistics(size, params.speculation.max_depth),
    )


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
) -> EngineState:
    """Assign prompts to rows; ``prefill`` then reads them.

    No model runs. Pages stay unchanged; states with an entry per row are cleared.

    Args:
      rows: [B] distinct row indices; those outside 0 .. R - 1 are padding.
      prompts: int32 [B, T], of which the first ``prompt_lens`` [B] are the prompt.
      sampling: sampling of the B rows, from make_sampling; greedy by default.
      controls: bias and penalties of the B rows, from make_controls; none by default.
      max_lens: [B] most tokens of each row, prompt included; by default the length of the token
        buffer.
      stop_token_ids: ids that end a row: a tuple for all rows, or [B, E] padded with -1.
      page_table: [B, M] pages of each row, padded with the null page 0; by default the row's
        current pages.
      cached_lens: [B] first tokens of each prompt whose KV the row's pages already hold, target's
        and drafter's; 0 by default. They are not written again. The last of them, or the drafter's
        last ``reread``, are still read, for the hidden states that the drafter needs, so all of a
        prompt may be cached.
      may_wait: a row's limit may need more pages than it has yet: it waits for them as it decodes
        (see assign_pages).

    A row is DONE at once, with Ending.TOO_LONG, if its prompt or limit does not fit its pages, the
    token buffer or ``prompts``, or if its pages are not in the pool. A row whose prompt is as long
    as its limit still gets the token after the prompt.

    Raises ValueError for shapes that do not fit, and for controls if the state has no room for
    them.
    """
    params.check(state, controls=controls is not None)
    rows, prompts = jnp.asarray(rows, jnp.int32), jnp.asarray(prompts, jnp.int32)
    batch, length = rows.shape[0], state.rows.tokens.shape[1]
    if prompts.shape[1] > length:
        raise ValueError(f"a prompt of {prompts.shape[1]} tokens is longer than a row ({length})")
    if page_table is not None and page_table.shape != (batch, state.rows.page_table.shape[1]):
        raise ValueError(
            f"a page_table for {batch} rows must be "
            f"{[batch, state.rows.page_table.shape[1]]}, not {list(page_table.shape)}"
        )
    arrived = {
        "prompts": prompts,
        "prompt_lens": jnp.asarray(prompt_lens, jnp.int32),
        "sampling": make_sampling(batch) if sampling is None else sampling,
        "max_lens": jnp.full(batch, length) if max_lens is None else jnp.asarray(max_lens),
        "stops": _stop_table(stop_token_ids, batch, state.rows.stop_tokens.shape[1]),
        "page_table": page_table,
        "cached_lens": jnp.zeros(batch) if cached_lens is None else jnp.asarray(cached_lens),
    }
    if controls is not None:
        controls = _padded_controls(params, controls, batch)
    # Every device gets all arriving rows, but only its own part of the vocabulary.
    controls_spec = partition_specs(controls, Layout(vocab=params.layout.vocab))
    arguments, specs = (rows, arrived, controls), (P(), P(), controls_spec)
    return on_mesh(functools.partial(_admit, may_wait), params, state, arguments, specs, None)


def _padded_controls(params: EngineParams, controls: Controls, batch: int) -> Controls:
    """With the vocabulary as wide as the target's arrays. Raises ValueError for other shapes."""
    padded, vocab = params.target.local_vocab, params.target.config.vocab_size
    if controls.bias.shape not in ((batch, vocab), (batch, padded)):
        raise ValueError(
            f"controls for {batch} rows of {vocab} tokens must have a bias of {[batch, vocab]}, "
            f"not {list(controls.bias.shape)}"
        )
    missing = padded - controls.bias.shape[1]
    return controls.replace(bias=jnp.pad(controls.bias, ((0, 0), (0, missing))))


def _stop_table(ids: Any, batch: int, width: int) -> Array:
    table = jnp.asarray(ids, jnp.int32)
    if table.ndim == 1:
        table = jnp.broadcast_to(table, (batch, table.shape[0]))
    if table.shape[1] > width:
        raise ValueError(
            f"{table.shape[1]} stop tokens, the state has room for {width}: make it with a larger "
            "max_stops"
        )
    return jnp.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)


def _admit(
    may_wait: bool,
    params: EngineParams,
    state: EngineState,
    rows: Array,
    arrived: dict[str, Any],
    controls: Controls | None,
) -> EngineState:
    own = state.rows
    index = local_rows(rows, own.status.shape[0], params.layout.batch)
    table = arrived["page_table"]
    table = take_rows(own.page_table, index) if table is None else table
    max_lens, lens = arrived["max_lens"].astype(jnp.int32), arrived["prompt_lens"]
    length, width = own.tokens.shape[1], arrived["prompts"].shape[1]
    cached = arrived["cached_lens"].astype(jnp.int32)
    held = _held_slots(table, state.pool.page_size)
    local_pages = state.pool.num_pages // params.data_parallel
    fits = (lens >= 1) & (lens <= width) & (lens < length) & (max_lens <= length)
    fits &= jnp.all((table >= 0) & (table < local_pages), axis=1)
    needed = table.shape[1] * state.pool.page_size if may_wait else held
    scratch = params.speculation.scratch_slots
    fits &= (lens <= held) & (cached <= lens) & (max_lens + scratch <= needed)
    empty = _empty_rows(params, index, table, length, own.stop_tokens.shape[1])
    new = empty.replace(
        status=jnp.where(fits, Status.READING, Status.DONE).astype(jnp.int32),
        ending=jnp.where(fits, Ending.NONE, Ending.TOO_LONG).astype(jnp.int32),
        tokens=jnp.pad(arrived["prompts"], ((0, 0), (0, length - width))),
        prompt_lens=lens,
        context_lens=jnp.maximum(cached - params.drafter.reread, 0),
        cached_lens=cached,
        max_lens=max_lens,
        room=held - scratch,
        stop_tokens=arrived["stops"],
        sampling=arrived["sampling"],
    )
    pool = state.pool.replace(
        target=state.pool.target.reset(index),
        draft=checks.reset_pool(params.drafter, state, index),
    )
    if state.controls is not None:
        controls = _no_controls(params, rows.shape[0]) if controls is None else controls
        controls = put_rows(state.controls, index, controls)
    return state.replace(pool=pool, rows=put_rows(own, index, new), controls=controls)


def set_controls(
    params: EngineParams, state: EngineState, rows: Integers, controls: Controls
) -> EngineState:
    """Give rows [B] other controls, from make_controls, as admit does.

    Row indices outside 0 .. R - 1 are padding.

    Raises ValueError for controls of another shape, and if the state has no room for them.
    """
    params.check(state, controls=True)
    index = jnp.asarray(rows, jnp.int32)
    controls = _padded_controls(params, controls, index.shape[0])
    spec = partition_specs(controls, Layout(vocab=params.layout.vocab))
    return on_mesh(_set_controls, params, state, (index, controls), (P(), spec), None)


def _set_controls(
    params: EngineParams, state: EngineState, rows: Array, controls: Controls
) -> EngineState:
    index = local_rows(rows, state.rows.status.shape[0], params.layout.batch)
    return state.replace(controls=put_rows(state.controls, index, controls))


def _held_slots(table: Array, page_size: int) -> Array:
    """Slots of the pages that come before the first null page: table [B, M] -> int32 [B]."""
    return jnp.sum(jnp.cumprod(table > 0, axis=1), axis=1, dtype=jnp.int32) * page_size


def assign_pages(
    params: EngineParams, state: EngineState, rows: Integers, page_table: Array
) -> EngineState:
    """Give rows [B] other page tables [B, M]: those they have and more, so that they need not wait.

    Row indices outside 0 .. R - 1 are padding.
    """
    params.check(state)
    arguments = jnp.asarray(rows, jnp.int32), jnp.asarray(page_table, jnp.int32)
    return on_mesh(_assign_pages, params, state, arguments, (P(), P()), None)


def _assign_pages(
    params: EngineParams, state: EngineState, rows: Array, page_table: Array
) -> EngineState:
    own = state.rows
    index = local_rows(rows, own.status.shape[0], params.layout.batch)
    held = _held_slots(page_table, state.pool.page_size)
    room = held - params.speculation.scratch_slots
    return state.replace(
        rows=own.replace(
            page_table=own.page_table.at[index].set(page_table, mode="drop"),
            room=own.room.at[index].set(room, mode="drop"),
        )
    )


def release(params: EngineParams, state: EngineState, rows: Integers) -> EngineState:
    """Make rows [B] empty, whatever their status; indices outside 0 .. R - 1 are padding.

    Their pages become free: their contents are never read again.
    """
    params.check(state)
    return on_mesh(_release, params, state, (jnp.asarray(rows, jnp.int32),), (P(),), None)


def _release(params: EngineParams, state: EngineState, rows: Array) -> EngineState:
    own = state.rows
    index = local_rows(rows, own.status.shape[0], params.layout.batch)

    def cleared(x: Array) -> Array:
        return x.at[index].set(0, mode="drop")

    return state.replace(
        rows=own.replace(
            status=cleared(own.status),
            ending=cleared(own.ending),
            context_lens=cleared(own.context_lens),
            sampling=own.sampling.replace(temperature=cleared(own.sampling.temperature)),
        )
    )
