"""Prefill: reads prompts in chunks, for all rows or some of them."""

import functools

import jax.numpy as jnp
from jax import Array

from jaxspec import collectives
from jaxspec.functional.decode import emitted_specs, refuse_sampling
from jaxspec.functional.params import EngineParams, Integers, on_mesh, row_spec
from jaxspec.functional.subset import check_split, choose_rows, put_chosen
from jaxspec.models import decoder
from jaxspec.sampling import perturb, process_logits, vocab_ids
from jaxspec.speculation.call import Call
from jaxspec.speculation.drafters import PrefillChunk
from jaxspec.speculation.drafters.paged import causal_attend, prompt_tokens
from jaxspec.speculation.round import split_captured, token_logprobs
from jaxspec.speculation.token_masks import check_masks, restrict
from jaxspec.state import Emitted, Ending, EngineState, Status


def prefill(
    params: EngineParams,
    state: EngineState,
    rows: Integers | None = None,
    counts: Integers | None = None,
    *,
    width: int,
    columns: int | None = None,
    greedy: bool = False,
    logprobs: bool = False,
    hidden: tuple[int, ...] = (),
    masks: Array | None = None,
) -> tuple[EngineState, Emitted]:
    """Read the next prompt tokens of some rows.

    At the end of a prompt the next token is sampled, and the row starts to decode.

    Args:
      rows: [B] distinct row indices. Indices outside 0 .. R - 1 are padding, and rows that are not
        reading stay unchanged. None: all rows. Under data parallelism the list is split evenly over
        the devices, and each part may only list rows of its own device. In a traced list, other
        rows are emitted as MISPLACED.
      counts: [B] most tokens to read of each row; None: ``width``.
      width: tokens per row that the program has room for.
      columns: width of the page table that the program sees, None: all of it. The rows and the
        chunk must fit it.
      greedy: compile a program without sampling. A row that samples ends as NOT_GREEDY.
      logprobs, hidden: see decode.
      masks: uint32 [B, ceil(V / 32)], the tokens that each row may sample at the end of its prompt
        (see speculation.token_masks); None: all.

    Returns the state, and what the B rows emitted: at most one token each. ``num_rounds`` is 0.

    Raises ValueError for a width below 1, for a list of rows that cannot be split over the
    devices, and for masks of another shape or dtype.
    """
    params.check(state)
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    call = params.call(greedy=greedy, logprobs=logprobs, hidden=hidden)
    if rows is not None:
        check_split(params, rows, state.rows.status.shape[0])
        rows = jnp.asarray(rows, jnp.int32)
    counts = None if counts is None else jnp.asarray(counts, jnp.int32)
    if masks is not None:
        batch = state.rows.status.shape if rows is None else rows.shape
        check_masks(masks, batch, params.target.config.vocab_size)
    spec = row_spec(params)
    width = min(width, state.rows.tokens.shape[1])
    function = functools.partial(_prefill, call, width, columns)
    arguments = (rows, counts, masks)
    specs = tuple(None if x is None else spec for x in arguments)
    return on_mesh(function, params, state, arguments, specs, emitted_specs(params, call))


def _prefill(
    call: Call,
    width: int,
    columns: int | None,
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
    counts: Array | None,
    masks: Array | None,
) -> tuple[EngineState, Emitted]:
    chosen, index = choose_rows(params, state, rows, columns)
    if call.greedy:
        refused = refuse_sampling(chosen.rows, chosen.rows.status == Status.READING)
        chosen = chosen.replace(rows=refused)
    read, emitted = _read_chunk(call, width, params, chosen, counts, masks)
    return put_chosen(params, state, rows, index, read, emitted)


def _read_chunk(
    call: Call,
    width: int,
    params: EngineParams,
    state: EngineState,
    limits: Array | None,
    masks: Array | None,
) -> tuple[EngineState, Emitted]:
    """Read the next chunk of all rows of ``state`` that are reading."""
    rows, target = state.rows, params.target
    reading = rows.status == Status.READING
    left = rows.prompt_lens - rows.context_lens
    counts = jnp.minimum(left, width)
    counts = counts if limits is None else jnp.clip(limits, 0, counts)
    counts = jnp.where(reading, counts, 0)
    places = jnp.minimum(rows.context_lens[:, None] + jnp.arange(width), rows.tokens.shape[1] - 1)
    run = prompt_tokens(state, jnp.take_along_axis(rows.tokens, places, axis=1), counts)
    states, capture = state.pool.target, params.drafter.capture
    hidden, layers, captured = decoder.run(
        target,
        run.tokens,
        run.positions,
        states.layers,
        causal_attend(state, run),
        (*capture, *call.hidden),
        call.kernels,
    )
    features, asked = split_captured(captured, len(capture), len(call.hidden))
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    logits = decoder.logits(target, jnp.take_along_axis(hidden, last, axis=1), call.kernels)
    ends = reading & (counts == left)
    legal = logits if masks is None else restrict(logits, masks[:, None], target.layout)
    roots = _sample(legal, state, rows.context_lens + counts, call, params)
    finite = collectives.all_finite(legal, target.layout)[:, 0]
    draft = params.drafter.prefill(
        target, state, PrefillChunk(tokens=run.tokens, counts=counts), features, call
    )
    pool = state.pool.replace(target=states.replace(layers=layers), draft=draft.pool)
    ending = jnp.where(rows.prompt_lens + 1 >= rows.max_lens, Ending.LENGTH, Ending.NONE)
    stopped = jnp.any(roots[:, None] == rows.stop_tokens, axis=1)
    ending = jnp.where(stopped, Ending.STOP, ending)
    ending = jnp.where(finite, ending, Ending.NOT_FINITE)
    status = jnp.where(ending == Ending.NONE, Status.DECODING, Status.DONE)
    sampled = ends & finite
    row, length = jnp.arange(counts.shape[0]), rows.tokens.shape[1]
    root_at = jnp.where(sampled, rows.prompt_lens, length)
    after = rows.replace(
        status=jnp.where(ends, status, rows.status),
        ending=jnp.where(ends, ending, rows.ending),
        tokens=rows.tokens.at[row, root_at].set(roots, mode="drop"),
        context_lens=rows.context_lens + counts,
        draft=draft.rows,
    )
    asked = None if asked is None else jnp.take_along_axis(asked, last, axis=1)[None]
    own = token_logprobs(logits, roots[:, None], target)[None] if call.logprobs else None
    none = jnp.zeros_like(counts)[None]
    emitted = Emitted(
        num_rounds=jnp.int32(0),  # no draft was verified
        tokens=roots[None, :, None],
        counts=sampled.astype(jnp.int32)[None],
        accepted=none,
        drafted=none,
        status=after.status,
        ending=after.ending,
        logprobs=own,
        hidden=asked,
    )
    return state.replace(pool=pool, rows=after), emitted


def _sample(
    logits: Array, state: EngineState, positions: Array, call: Call, params: EngineParams
) -> Array:
    """Sample [B] tokens at ``positions`` [B] from raw logits [B, 1, V / shards]."""
    sampling, layout = state.rows.sampling, params.target.layout
    processed = process_logits(logits, sampling, layout, greedy=call.greedy, kernels=call.kernels)
    ids = vocab_ids(logits.shape[-1], layout)
    noisy = perturb(processed, sampling, positions[:, None], ids, greedy=call.greedy)
    return collectives.argmax(noisy, layout)[:, 0]
