"""Prefill: reads prompts in chunks, for all rows or some of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.decoding.blocks import map_blocks
from jaxspec.decoding.drafters import PrefillChunk
from jaxspec.decoding.drafters.base import heard_by
from jaxspec.decoding.drafters.checks import checked_state
from jaxspec.decoding.drafters.paged import TokenRun, causal_attend, prompt_tokens
from jaxspec.decoding.functional.checks import (
    check_counts,
    check_order,
    check_policy,
    check_sizes,
    check_state,
)
from jaxspec.decoding.functional.params import EngineParams, on_mesh, row_spec
from jaxspec.decoding.functional.record import emitted_specs
from jaxspec.decoding.functional.refusals import refuse_rows
from jaxspec.decoding.functional.subset import choose_rows, listed_rows, put_chosen
from jaxspec.decoding.functional.target_tokens import draw, endings, scores
from jaxspec.decoding.round import split_captured
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import History, Logprobs, token_logprobs
from jaxspec.decoding.state import Emitted, EngineState, PromptLogprobs, Rows, Status
from jaxspec.decoding.token_masks import check_masks, restrict
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.pipeline_stage import Passage
from jaxspec.parallel import Layout
from jaxspec.parallel.array_checks import Integers

SCORED_AT_ONCE = 256  # prompt tokens whose logits are in memory together, for their logprobs


def prefill(
    params: EngineParams,
    state: EngineState,
    rows: Integers | None = None,
    counts: Integers | None = None,
    *,
    width: int,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    prompt_logprobs: bool = False,
    hidden: tuple[int, ...] = (),
    order_invariant: bool = False,
    masks: Array | None = None,
    policy_logprobs: bool = False,
) -> tuple[EngineState, Emitted]:
    """Read the next prompt tokens of some rows: a chunk of each. ``prefill_all`` reads them all.

    At the end of a prompt the next token is sampled, and the row starts to decode. Until then it
    generates nothing.

    Args:
      rows: [B] distinct row indices. -1, and in a traced list any index outside 0 .. R - 1, is
        padding, and rows that are not reading stay unchanged. None: all rows. Under data
        parallelism the list is split evenly over the devices, and each part may only list rows of
        its own device. In a traced list, other rows are emitted as MISPLACED.
      counts: [B] most tokens to read of each row, 0 to ``width``; None: ``width``.
      width: most tokens of a row that the program reads.
      columns: width of the page table that the program sees, None: all of it. The rows and the
        chunk must fit it.
      greedy: compile a program without sampling. A row that samples ends as NOT_GREEDY.
      controls, logprobs, top_logprobs, hidden: see decode.
      prompt_logprobs: emit the log-probabilities of the prompt's own tokens, and ``top_logprobs``
        alternatives of each (see state.PromptLogprobs).
      order_invariant: make attention sums independent of slot order. In bfloat16 the result is then
        the same however a prompt is cut into chunks, if ``width`` and the number of rows are.
      masks: uint32 [B, ceil(V / 32)], the tokens that each row may sample at the end of its prompt
        (see decoding.token_masks); None: all.
      policy_logprobs: of the token after the prompt: see decode. Not with controls or masks.

    Returns the state, and what the B rows emitted: at most one token each. ``num_rounds`` is 0.

    Raises ValueError for a width that is no integer or below 1, for rows that the state lacks or
    that cannot be split over the devices, if no row was admitted, for counts above ``width``, for
    controls if the state has none, for masks of another shape or dtype, and for controls or masks
    beside policy_logprobs.
    """
    check_state(params, state, controls=controls)
    check_policy(policy_logprobs, controls=controls, masks=masks is not None)
    check_sizes(width=width, columns=columns)
    options = RoundOptions(
        params.speculation_of(None),
        params.kernels,
        columns=columns,
        greedy=greedy,
        controls=controls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        hidden=hidden,
        width=width,
        prompt_logprobs=prompt_logprobs,
        order_invariant=order_invariant,
        policy_logprobs=policy_logprobs,
    )
    options, listed = params.checked_options(options), listed_rows(params, state, rows)
    batch = state.rows.status.shape if listed is None else listed.shape
    if counts is not None:
        check_counts(counts, batch[0], width)
        counts = jnp.asarray(counts, jnp.int32)
    if masks is not None:
        check_masks(masks, batch, params.target.config.vocab_size)
    check_order(state, listed)
    return read_rows(params, state, options, listed, counts, masks)


def read_rows(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    rows: Array | None,
    counts: Array | None = None,
    masks: Array | None = None,
) -> tuple[EngineState, Emitted]:
    """Read the next chunk of rows [B], int32, up to ``counts`` [B] tokens each. See prefill."""
    params.check(state, controls=options.controls)
    width = min(options.width, state.rows.tokens.shape[1])
    options = dataclasses.replace(options, width=width)
    arguments, spec = (rows, counts, masks), row_spec(params)
    specs = tuple(None if x is None else spec for x in arguments)
    emitted = emitted_specs(params, options, state)
    function = functools.partial(read_shard, options)
    return on_mesh(function, params, state, arguments, specs, emitted)


def read_shard(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
    counts: Array | None,
    masks: Array | None,
    before: Passage | None = None,
) -> tuple[EngineState, Emitted]:
    """Read a chunk on one device's shard; ``before``: its passage of a pipeline."""
    chosen, index = choose_rows(params, state, rows, options.columns)
    chosen = refuse_rows(options, chosen, Status.READING)
    read, emitted = read_chunk(options, params, chosen, counts, masks, before)
    return put_chosen(params, state, rows, index, read, emitted)


def read_chunk(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    limits: Array | None,
    masks: Array | None,
    before: Passage | None = None,
) -> tuple[EngineState, Emitted]:
    """Read the next chunk of all rows of ``state`` that are reading."""
    rows, target = state.rows, params.target
    run, counts = next_tokens(state, options.width, limits)
    states, capture = state.pool.target, params.drafter.capture
    hidden, layers, captured = decoder.run(
        target,
        run.tokens if before is None else before,
        run.positions,
        states.layers,
        causal_attend(state, run, order_invariant=options.order_invariant),
        (*capture, *options.hidden),
        options.kernels,
        isolate_blocks=options.isolate_blocks,
    )
    asked_for = len(options.hidden) * target.config.hidden_size
    features, asked = split_captured(captured, len(capture), asked_for)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    ended = jnp.take_along_axis(hidden, last, axis=1)
    logits = decoder.logits(target, ended, options.kernels, isolate_blocks=options.isolate_blocks)
    lens = rows.context_lens + counts
    roots, finite = _next_token(logits, state, lens, masks, options, target.layout)
    chunk = PrefillChunk(tokens=run.tokens, counts=counts)
    draft = params.drafter.prefill(target, state, chunk, features, options)
    draft = checked_state(params.drafter, "prefill", state, draft)
    pool = state.pool.replace(target=states.replace(layers=layers), draft=draft.pool)
    after, sampled = _advanced(rows, counts, roots, finite)
    after = after.replace(draft=draft.rows)
    asked = None if asked is None else jnp.take_along_axis(asked, last, axis=1)[None]
    raw, of_policy = scores(options, target.layout, rows, logits, roots[:, None])
    given = jax.tree.map(lambda x: x[None], (*(raw or (None, None, None)), of_policy))
    logprobs, top_tokens, top_logprobs, of_policy = given
    prompt = None
    if options.prompt_logprobs:
        prompt = _prompt_logprobs(hidden, state, counts, options, target)
    none = jnp.zeros_like(counts)[None]
    emitted = Emitted(
        num_rounds=jnp.int32(0),  # no draft was verified
        tokens=roots[None, :, None],
        counts=sampled.astype(jnp.int32)[None],
        accepted=none,
        drafted=none,
        status=after.status,
        ending=after.ending,
        logprobs=logprobs,
        hidden=asked,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        prompt=prompt,
        policy_logprobs=of_policy,
        heard=heard_by(after.draft),
    )
    return state.replace(pool=pool, rows=after), emitted


def _advanced(rows: Rows, counts: Array, roots: Array, finite: Array) -> tuple[Rows, Array]:
    """The rows after a chunk of ``counts`` [R] tokens, and which of them got a root: their prompt
    has ended, and its last logits are ``finite`` [R]."""
    ends = (rows.status == Status.READING) & (counts == rows.prompt_lens - rows.context_lens)
    ending, status = endings(rows, roots, rows.prompt_lens, finite)
    sampled = ends & finite
    row, length = jnp.arange(counts.shape[0]), rows.tokens.shape[1]
    root_at = jnp.where(sampled, rows.prompt_lens, length)
    after = rows.replace(
        status=jnp.where(ends, status, rows.status),
        ending=jnp.where(ends, ending, rows.ending),
        tokens=rows.tokens.at[row, root_at].set(roots, mode="drop"),
        context_lens=rows.context_lens + counts,
    )
    return after, sampled


def next_tokens(state: EngineState, width: int, limits: Array | None) -> tuple[TokenRun, Array]:
    """What rows that are reading read next, and how many tokens [R] that is: at most ``width``, and
    at most ``limits`` [R]."""
    rows = state.rows
    counts = jnp.minimum(rows.prompt_lens - rows.context_lens, width)
    counts = counts if limits is None else jnp.clip(limits, 0, counts)
    counts = jnp.where(rows.status == Status.READING, counts, 0)
    places = jnp.minimum(rows.context_lens[:, None] + jnp.arange(width), rows.tokens.shape[1] - 1)
    return prompt_tokens(state, jnp.take_along_axis(rows.tokens, places, axis=1), counts), counts


def _next_token(
    logits: Array,
    state: EngineState,
    lens: Array,
    masks: Array | None,
    options: RoundOptions,
    layout: Layout,
) -> tuple[Array, Array]:
    """The tokens [B] that follow ``lens`` [B] tokens, from raw logits [B, 1, V / shards], and
    whether what they are drawn from is finite [B]."""
    history = None
    if masks is not None:
        logits = restrict(logits, masks[:, None], layout)
    if options.controls:
        no_path = jnp.zeros((*logits.shape[:2], 0), jnp.int32)
        history = History(state.rows.tokens, lens, no_path)
    tokens, finite = draw(options, layout, state, logits, lens[:, None], history)
    return tokens[:, 0], finite[:, 0]


def _prompt_logprobs(
    hidden: Array, state: EngineState, counts: Array, options: RoundOptions, target: Decoder
) -> PromptLogprobs:
    """Log-probabilities of the tokens after each of a chunk's, from hidden states [B, T, H].

    Logits are computed for a few positions at a time: all of them would need gigabytes.
    """
    rows, (batch, width, _) = state.rows, hidden.shape
    place = rows.context_lens[:, None] + 1 + jnp.arange(width)
    valid = (jnp.arange(width) < counts[:, None]) & (place < rows.prompt_lens[:, None])
    place = jnp.minimum(place, rows.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(rows.tokens, place, axis=1)

    def score(block: tuple[Array, Array]) -> Logprobs:
        hidden, tokens = block
        logits = decoder.logits(
            target, hidden, options.kernels, isolate_blocks=options.isolate_blocks
        )
        return token_logprobs(logits, tokens, options.top_logprobs, target.layout, options.kernels)

    block = min(width, max(1, SCORED_AT_ONCE // batch))
    logprobs, top_tokens, top_logprobs = map_blocks(score, (hidden, tokens), block)
    return PromptLogprobs(
        valid=valid, logprobs=logprobs, top_tokens=top_tokens, top_logprobs=top_logprobs
    )
