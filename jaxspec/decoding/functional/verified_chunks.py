"""Reads what may be a row's text, and keeps it as far as the target writes the same."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import LayerStates
from jaxspec.decoding.drafters import PrefillChunk
from jaxspec.decoding.drafters.base import heard_by
from jaxspec.decoding.drafters.checks import checked_state
from jaxspec.decoding.drafters.paged import TokenRun, causal_attend
from jaxspec.decoding.functional.decode import emitted_specs
from jaxspec.decoding.functional.params import EngineParams, on_mesh, row_spec
from jaxspec.decoding.functional.prefill import SCORED_AT_ONCE, next_tokens
from jaxspec.decoding.functional.refusals import refuse_rows
from jaxspec.decoding.functional.subset import choose_rows, put_chosen
from jaxspec.decoding.functional.target_tokens import draw, endings, scores
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import History, Logprobs
from jaxspec.decoding.state import Emitted, Ending, EngineState, Rows, Status
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder

PENALIZED_AT_ONCE = 16  # positions: penalties compare each with all before it in a block


def verify_chunk(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    rows: Array | None,
    counts: Array,
    given: Array,
) -> tuple[EngineState, Emitted]:
    """Read the next chunk of rows [B], int32, whose tokens after the first ``given`` are a draft.

    The rows are READING. Of those ``prompt_lens`` tokens that a row reads, the first ``given`` are
    its prompt. The target's own token is sampled at each position from there on. Where the draft
    has another, or the text ends, the row takes the target's token and decodes, or is DONE; its
    drafter has read what the row keeps. After the last drafted token it decodes in any case.

    Args:
      rows: see prefill; None: all.
      counts: int32 [B], most tokens to read of each row.
      given: int32 [B], at least 1.

    Returns the state, and what the B rows emitted: drafted tokens that were kept, and the target's
    own after them, if the row is not READING any more. ``accepted`` [1, B] are the drafted tokens
    among these, ``drafted`` those that the chunk had. ``num_rounds`` is 0.
    """
    params.check(state, controls=options.controls)
    arguments, specs = (rows, counts, given), [row_spec(params)] * 3
    specs = tuple(None if x is None else spec for x, spec in zip(arguments, specs, strict=True))
    emitted = emitted_specs(params, options, state)
    function = functools.partial(_verify_shard, options)
    return on_mesh(function, params, state, arguments, specs, emitted)


def _verify_shard(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
    counts: Array,
    given: Array,
) -> tuple[EngineState, Emitted]:
    chosen, index = choose_rows(params, state, rows, options.columns)
    chosen = refuse_rows(options, chosen, Status.READING)
    after, emitted = _verify(options, params, chosen, counts, given)
    return put_chosen(params, state, rows, index, after, emitted)


class _Drawn(NamedTuple):
    """The target's tokens after each of a chunk's, as far as they were needed."""

    tokens: Array  # int32 [B, T]
    finite: Array  # bool [B, T], what they are drawn from
    logprobs: Logprobs | None  # [B, T] each
    policy_logprobs: Array | None  # float32 [B, T]


def _verify(
    options: RoundOptions, params: EngineParams, state: EngineState, limits: Array, given: Array
) -> tuple[EngineState, Emitted]:
    """Verify the next chunk of all rows of ``state`` that are reading."""
    rows, target, drafter = state.rows, params.target, params.drafter
    run, counts = next_tokens(state, options.width, limits)
    hidden, layers, features = _run(options, params, state, run, state.pool.target.layers)
    drawn, ends = _draw_while_open(options, target, state, hidden, counts, given)
    ended, first = jnp.any(ends, axis=1), jnp.argmax(ends, axis=1).astype(jnp.int32)
    kept = jnp.where(ended, first + 1, counts)
    layers = _rolled_back(options, params, state, layers, kept, counts)
    chunk = PrefillChunk(tokens=run.tokens, counts=kept)
    draft = drafter.prefill(target, state, chunk, features, options)
    draft = checked_state(drafter, "prefill", state, draft)
    after = _advanced(rows, kept, drawn, ended, given)
    pool = state.pool.replace(target=state.pool.target.replace(layers=layers), draft=draft.pool)
    emitted = _emitted(rows, after, drawn, kept, counts, given)
    return state.replace(pool=pool, rows=after.replace(draft=draft.rows)), emitted


def _run(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    run: TokenRun,
    layers: LayerStates,
) -> tuple[Array, LayerStates, Array | None]:
    """Hidden states [B, T, H], the layers' states after the run, what the drafter captures."""
    return decoder.run(
        params.target,
        run.tokens,
        run.positions,
        layers,
        causal_attend(state, run, order_invariant=options.order_invariant),
        params.drafter.capture,
        options.kernels,
        isolate_blocks=options.isolate_blocks,
    )


def _rolled_back(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    layers: LayerStates,
    kept: Array,
    counts: Array,
) -> LayerStates:
    """The layers' states after only the first ``kept`` [B] tokens of the chunk.

    What lies past them in pages is overwritten later. A recurrent state cannot be taken back: if
    some row keeps fewer than ``counts``, those layers read again, from their states before.
    """
    if all(layer is None or layer.overwritable for layer in layers):
        return layers

    def again(layers: LayerStates) -> LayerStates:
        pairs = zip(layers, state.pool.target.layers, strict=True)
        start = tuple(
            after if after is None or after.overwritable else before for after, before in pairs
        )
        run, _ = next_tokens(state, options.width, kept)
        return _run(options, params, state, run, start)[1]

    return lax.cond(jnp.any(kept < counts), again, lambda layers: layers, layers)


def _draw_while_open(
    options: RoundOptions,
    target: Decoder,
    state: EngineState,
    hidden: Array,
    counts: Array,
    given: Array,
) -> tuple[_Drawn, Array]:
    """The target's tokens after each of a chunk's, from hidden states [B, T, H], and where a row's
    draft ends: bool [B, T].

    Logits are computed for a few positions at a time: all of them would need gigabytes. Those of
    the prompt are left out, and those after the end of every row's draft.
    """
    rows, (batch, width, _) = state.rows, hidden.shape
    block = min(width, max(1, SCORED_AT_ONCE // batch))
    block = min(block, PENALIZED_AT_ONCE) if options.controls else block
    padded = jnp.pad(hidden, ((0, 0), (0, -width % block), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(batch, -1, block, hidden.shape[-1]), 1, 0)
    offsets = jnp.arange(len(blocks), dtype=jnp.int32) * block

    def score(part: tuple[Array, Array]) -> _Drawn:
        return _target_tokens(options, target, state, *part)

    def step(open_rows: Array, part: tuple[Array, Array]) -> tuple[Array, tuple[_Drawn, Array]]:
        hidden, offset = part
        index = offset + jnp.arange(block)
        place = rows.context_lens[:, None] + 1 + index
        wanted = open_rows[:, None] & (index < counts[:, None]) & (place >= given[:, None])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(score, part))
        drawn = lax.cond(jnp.any(wanted), score, lambda _: nothing, part)
        ends = wanted & _ends_draft(rows, drawn, place)
        return open_rows & ~jnp.any(ends, axis=1), (drawn, ends)

    open_rows = rows.status == Status.READING
    _, found = lax.scan(step, open_rows, (blocks, offsets))

    def whole(x: Array) -> Array:  # [T / block, B, block, ...] -> [B, T, ...]
        return jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :width]

    return jax.tree.map(whole, found)


def _ends_draft(rows: Rows, drawn: _Drawn, place: Array) -> Array:
    """Whether the target's tokens at ``place`` [B, T] end the draft: bool [B, T]. It has another
    token there, or none, or the text ends."""
    known = jnp.take_along_axis(rows.tokens, jnp.minimum(place, rows.tokens.shape[1] - 1), axis=1)
    differs = (drawn.tokens != known) | (place >= rows.prompt_lens[:, None])
    stops = jnp.any(drawn.tokens[..., None] == rows.stop_tokens[:, None], axis=-1)
    return differs | stops | (place + 1 >= rows.max_lens[:, None]) | ~drawn.finite


def _target_tokens(
    options: RoundOptions, target: Decoder, state: EngineState, hidden: Array, offset: Array
) -> _Drawn:
    """The target's tokens after those of a block, which begins ``offset`` tokens after the context,
    from hidden states [B, T, H]."""
    rows, layout, history = state.rows, target.layout, None
    raw = decoder.logits(target, hidden, options.kernels, isolate_blocks=options.isolate_blocks)
    before, index = rows.context_lens + offset, jnp.arange(hidden.shape[1])
    if options.controls:
        history = History(rows.tokens, before, _paths(rows.tokens, before, hidden.shape[1]))
    tokens, finite = draw(options, layout, state, raw, before[:, None] + 1 + index, history)
    return _Drawn(tokens, finite, *scores(options, layout, rows, raw, tokens))


def _paths(tokens: Array, before: Array, size: int) -> Array:
    """Each of ``size`` tokens after the first ``before`` [B], and those between, upwards: int32
    [B, size, size], padded with -1."""
    index = jnp.arange(size)
    back = index[:, None] - index  # of node i, the d-th token upwards
    place = jnp.clip(before[:, None, None] + back, 0, tokens.shape[1] - 1)
    found = jnp.take_along_axis(tokens, place.reshape(len(tokens), -1), axis=1)
    return jnp.where(back >= 0, found.reshape(place.shape), -1)


def _advanced(rows: Rows, kept: Array, drawn: _Drawn, ended: Array, given: Array) -> Rows:
    """The rows after a chunk of which they keep ``kept`` [B] tokens; where the draft has
    ``ended`` [B] they take the target's token after these."""
    last = jnp.maximum(kept - 1, 0)[:, None]
    roots, finite = (
        jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (drawn.tokens, drawn.finite)
    )
    root_at = rows.context_lens + kept
    ending, status = endings(rows, roots, root_at, finite)
    row, place = jnp.arange(len(kept)), jnp.arange(rows.tokens.shape[1])
    sampled = ended & finite
    # What the draft had from the root on is no text of the row.
    rest = ended[:, None] & (place >= root_at[:, None])
    tokens = jnp.where(rest, 0, rows.tokens)
    tokens = tokens.at[row, jnp.where(sampled, root_at, len(place))].set(roots, mode="drop")
    return rows.replace(
        status=jnp.where(ended, status, rows.status),
        ending=jnp.where(ended, ending, rows.ending),
        tokens=tokens,
        prompt_lens=jnp.where(ended, given, rows.prompt_lens),
        context_lens=root_at,
    )


def _emitted(
    rows: Rows, after: Rows, drawn: _Drawn, kept: Array, counts: Array, given: Array
) -> Emitted:
    """What the chunk adds to the text: the target's tokens from place ``given`` [B] on."""
    start, width = jnp.maximum(given - rows.context_lens - 1, 0), drawn.tokens.shape[1]
    index = jnp.minimum(start[:, None] + jnp.arange(width), width - 1)

    def from_start(x: Array) -> Array:  # [B, T, ...] -> [1, B, T, ...]
        at = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, at, axis=1)[None]

    ended = (rows.status == Status.READING) & (after.status != Status.READING)
    sampled = ended & (after.ending != Ending.NOT_FINITE)
    new = jnp.maximum(kept - start, 0) - (ended & ~sampled)
    place = jnp.minimum(after.context_lens, rows.tokens.shape[1] - 1)[:, None]
    old, root = (jnp.take_along_axis(x.tokens, place, axis=1)[:, 0] for x in (rows, after))
    is_bonus = sampled & ((after.context_lens >= rows.prompt_lens) | (old != root))
    end = jnp.minimum(rows.context_lens + counts + 1, rows.prompt_lens)
    drafted = jnp.maximum(end - jnp.maximum(rows.context_lens + 1, given), 0)
    raw = drawn.logprobs or (None, None, None)
    given_scores = jax.tree.map(from_start, (*raw, drawn.policy_logprobs))
    logprobs, top_tokens, top_logprobs, of_policy = given_scores
    return Emitted(
        num_rounds=jnp.int32(0),  # no tree was verified
        tokens=from_start(drawn.tokens),
        counts=new[None],
        accepted=(new - is_bonus)[None],
        drafted=jnp.where(counts > 0, drafted, 0)[None],
        status=after.status,
        ending=after.ending,
        logprobs=logprobs,
        policy_logprobs=of_policy,
        hidden=None,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        heard=heard_by(after.draft),
    )
