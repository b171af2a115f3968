"""Creates states, and changes and releases rows. Nothing here runs a model."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxspec.cache import Geometry, sequential_page_table
from jaxspec.config.cache import pages_for
from jaxspec.decoding.drafters import checks
from jaxspec.decoding.functional.checks import check_params, check_rows, check_state, check_table
from jaxspec.decoding.functional.params import EngineParams, on_mesh
from jaxspec.decoding.functional.subset import local_rows, put_rows
from jaxspec.decoding.past_text import empty_past
from jaxspec.decoding.sampling import Controls, make_controls, make_sampling
from jaxspec.decoding.state import Ending, EngineState, Pool, Rows, Status, empty_statistics
from jaxspec.parallel import (
    Layout,
    check_divides,
    named_shardings,
    partition_specs,
)
from jaxspec.parallel.array_checks import ArrayProblems, Integers, as_int32


def init_state(
    params: EngineParams,
    num_rows: int,
    max_length: int,
    *,
    page_size: int = 16,
    page_table: Integers | None = None,
    num_pages: int | None = None,
    max_stops: int = 4,
    controls: bool = False,
) -> EngineState:
    """A state of ``num_rows`` empty rows of at most ``max_length`` tokens each.

    Args:
      page_table: [R, M] pages of each row. By default each row has its own consecutive pages, for
        ``max_length`` tokens and the tree after them.
      num_pages: total number of pages, null pages included; required with ``page_table``.
      max_stops: most stop tokens of a row.
      controls: hold bias and penalties, too: 4 V bytes a row.

    The state lies on the devices of the weights, committed to them if the weights are.

    Raises ValueError for sizes that are no integers or too small, and if the rows cannot be split
    over the mesh, the table is too narrow, or the tree is too deep for a sliding window.
    """
    check_params(params)
    problems = ArrayProblems()
    problems.whole("num_rows", num_rows, 1)
    problems.whole("max_length", max_length, 2, " (a token to read and one to generate)")
    problems.whole("page_size", page_size, 1)
    problems.whole("max_stops", max_stops, 0)
    if num_pages is not None:
        problems.whole("num_pages", num_pages, 1 + params.data_parallel, " with the null pages")
    problems.raise_all()
    if (page_table is None) != (num_pages is None):
        raise ValueError("give page_table and num_pages together, or neither")
    table = None
    if page_table is not None and num_pages is not None:
        table = _as_table(page_table, num_rows, num_pages // params.data_parallel)
    needed = pages_for(max_length + params.speculation.scratch_slots, page_size)
    if num_pages is None:
        num_pages = num_rows * needed + params.data_parallel
    pool = init_pool(params, num_pages, page_size, num_rows)
    return init_rows(
        params, pool, num_rows, max_length, table, max_stops=max_stops, controls=controls
    )


def _as_table(table: Integers, num_rows: int, num_pages: int) -> Array:
    """Pages [R, M] of each row. Raises ValueError for other shapes, and for pages that the pool, or
    a device's part of it, does not have."""
    made, problems = as_int32("page_table", table, "[R, M]"), ArrayProblems()
    if len(made) != num_rows:
        raise ValueError(f"page_table has {len(made)} rows for {num_rows}: give one for each")
    rule = f"pages are 0 to {num_pages - 1}"
    problems.within("page_table", made, lambda x: (x >= 0) & (x < num_pages), rule)
    problems.raise_all()
    return made


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
    if num_rows % shards:
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
    rows = empty_rows(params, index, page_table, max_length, max(1, max_stops))
    state = EngineState(
        pool=pool,
        rows=rows,
        controls=new_controls(params, num_rows) if controls else None,
        capacity=params.speculation,
        drafter=params.drafter_name,
        dtype=str(params.target.dtype),
    )
    return _beside_weights(params, state)


def no_controls(params: EngineParams, num_rows: int) -> Controls:
    """Controls of a state's rows that change nothing, on the devices of the weights."""
    return _beside_weights(params, new_controls(params, num_rows))


def _beside_weights[T](params: EngineParams, made: T) -> T:
    """What was made for these parameters, placed as programs return it: on the mesh, or committed
    to a device if the weights are. A user's program then is compiled once, not once for the first
    state and once for those after it."""
    if params.mesh is not None:
        shardings = named_shardings(params.mesh, made, params.layout)
        return jax.tree.map(jax.device_put, made, shardings)
    embed = params.target.embed
    traced = any(isinstance(leaf, Tracer) for leaf in (embed, *jax.tree.leaves(made)))
    if traced or not isinstance(embed, Array) or not embed.committed:
        return made
    return jax.device_put(made, embed.sharding)


def new_controls(params: EngineParams, num_rows: int) -> Controls:
    # A separate array for each field: a shared one would be donated twice.
    return jax.tree.map(jnp.array, make_controls(num_rows, params.target.local_vocab))


def empty_rows(
    params: EngineParams, index: Array, page_table: Array, max_length: int, max_stops: int
) -> Rows:
    # A separate array for each field: a shared one would be donated twice.
    size = index.shape[0]
    status, ending, prompt_lens, context_lens, cached_lens, max_lens, context_capacity = (
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
        context_capacity=context_capacity,
        stop_tokens=jnp.full((size, max_stops), -1, jnp.int32),
        page_table=jnp.array(page_table, jnp.int32),
        sampling=jax.tree.map(jnp.array, make_sampling(size)),
        draft=checks.new_rows(params.drafter, size, params.target, params.speculation),
        stats=empty_statistics(size, params.speculation.max_depth),
    )


def padded_controls(params: EngineParams, controls: Controls, batch: int) -> Controls:
    """Controls of ``batch`` rows with the vocabulary as wide as the target's arrays.

    Raises ValueError for other shapes, and for what is no Controls.
    """
    if not isinstance(controls, Controls):
        raise ValueError(
            f"controls must be what make_controls gives, not {type(controls).__name__}"
        )
    padded, vocab = params.target.local_vocab, params.target.config.vocab_size
    if controls.bias.shape not in ((batch, vocab), (batch, padded)):
        raise ValueError(
            f"controls for {batch} rows of {vocab} tokens must have a bias of {[batch, vocab]}, "
            f"not {list(controls.bias.shape)}"
        )
    missing = padded - controls.bias.shape[1]
    return controls.replace(bias=jnp.pad(controls.bias, ((0, 0), (0, missing))))


def set_controls(
    params: EngineParams, state: EngineState, rows: Integers, controls: Controls
) -> EngineState:
    """Give rows [B] other controls, from make_controls, as admit does.

    Padding of ``rows`` is -1, and in a traced list any index outside 0 .. R - 1.

    Raises ValueError for controls of another shape, and if the state was made without them.
    """
    check_state(params, state, controls=True)
    index = _indices(state, rows)
    controls = padded_controls(params, controls, index.shape[0])
    spec = partition_specs(controls, Layout(vocab=params.layout.vocab))

    def put(
        params: EngineParams, state: EngineState, rows: Array, controls: Controls
    ) -> EngineState:
        index = local_rows(rows, state.rows.status.shape[0], params.layout.batch)
        return state.replace(controls=put_rows(state.controls, index, controls))

    return on_mesh(put, params, state, (index, controls), (P(), spec), None)


def _indices(state: EngineState, rows: Integers) -> Array:
    """Row indices as int32 [B]. Raises ValueError for what check_rows refuses."""
    return jnp.asarray(check_rows(rows, state.rows.status.shape[0]), jnp.int32)


def resume(
    params: EngineParams,
    state: EngineState,
    rows: Integers,
    stop_token_ids: Integers,
    temperature: ArrayLike,
) -> EngineState:
    """Let rows [B] go on that a stop token has ended, with other stop tokens.

    Args:
      rows: padding is -1, and in a traced list any index outside 0 .. R - 1.
      stop_token_ids: int32 [B, E], padded with -1; E is that of the state.
      temperature: float32 [B], of their sampling: calls that list rows that are done forget it.
    """
    check_state(params, state)
    stops = jnp.asarray(stop_token_ids, jnp.int32)
    arguments = _indices(state, rows), stops, jnp.asarray(temperature, jnp.float32)
    return on_mesh(_resume, params, state, arguments, (P(),) * 3, None)


def _resume(
    params: EngineParams, state: EngineState, rows: Array, stops: Array, temperature: Array
) -> EngineState:
    before = state.rows
    index = local_rows(rows, before.status.shape[0], params.layout.batch)
    resumed = before.replace(
        status=before.status.at[index].set(Status.DECODING, mode="drop"),
        ending=before.ending.at[index].set(Ending.NONE, mode="drop"),
        stop_tokens=before.stop_tokens.at[index].set(stops, mode="drop"),
        sampling=before.sampling.replace(
            temperature=before.sampling.temperature.at[index].set(temperature, mode="drop")
        ),
    )
    return state.replace(rows=resumed)


def held_slots(table: Array, page_size: int) -> Array:
    """Slots of the pages that come before the first null page: table [B, M] -> int32 [B]."""
    return jnp.sum(jnp.cumprod(table > 0, axis=1), axis=1, dtype=jnp.int32) * page_size


def assign_pages(
    params: EngineParams, state: EngineState, rows: Integers, page_table: Integers
) -> EngineState:
    """Give rows [B] other page tables [B, M]: those they have and more, so that they need not wait.

    Padding of ``rows`` is -1, and in a traced list any index outside 0 .. R - 1.

    Raises ValueError for a table of another shape, and for pages that the pool does not have.
    """
    check_state(params, state)
    index, table = _indices(state, rows), as_int32("page_table", page_table, "[B, M]")
    check_table(params, state, table, len(index))
    arguments = index, table
    return on_mesh(_assign_pages, params, state, arguments, (P(), P()), None)


def _assign_pages(
    params: EngineParams, state: EngineState, rows: Array, page_table: Array
) -> EngineState:
    all_rows = state.rows
    index = local_rows(rows, all_rows.status.shape[0], params.layout.batch)
    held = held_slots(page_table, state.pool.page_size)
    context_capacity = held - params.speculation.scratch_slots
    return state.replace(
        rows=all_rows.replace(
            page_table=all_rows.page_table.at[index].set(page_table, mode="drop"),
            context_capacity=all_rows.context_capacity.at[index].set(context_capacity, mode="drop"),
        )
    )


def release(params: EngineParams, state: EngineState, rows: Integers) -> EngineState:
    """Make rows [B] empty, whatever their status; padding is -1, and in a traced list any index
    outside 0 .. R - 1.

    Their pages become free: their contents are never read again.
    """
    check_state(params, state)
    return on_mesh(_release, params, state, (_indices(state, rows),), (P(),), None)


def _release(params: EngineParams, state: EngineState, rows: Array) -> EngineState:
    all_rows = state.rows
    index = local_rows(rows, all_rows.status.shape[0], params.layout.batch)

    def cleared(x: Array) -> Array:
        return x.at[index].set(0, mode="drop")

    return state.replace(
        rows=all_rows.replace(
            status=cleared(all_rows.status),
            ending=cleared(all_rows.ending),
            context_lens=cleared(all_rows.context_lens),
            sampling=all_rows.sampling.replace(temperature=cleared(all_rows.sampling.temperature)),
        )
    )
