"""Reads prompts with texts that may follow them, and keeps what the target writes itself."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.decoding.functional.checks import (
    check_order,
    check_policy,
    check_sizes,
    check_state,
)
from jaxspec.decoding.functional.params import EngineParams, on_mesh, row_spec
from jaxspec.decoding.functional.rows import held_slots
from jaxspec.decoding.functional.subset import listed_rows, local_rows, put_rows, take_rows
from jaxspec.decoding.functional.verified_chunks import verify_chunk
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import Emitted, EngineState, Status
from jaxspec.parallel.array_checks import ArrayProblems, Integers, integers


def verify_prefix(
    params: EngineParams,
    state: EngineState,
    rows: Integers | None,
    drafts: Integers,
    draft_lens: Integers,
    *,
    width: int,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    policy_logprobs: bool = False,
    order_invariant: bool = False,
) -> tuple[EngineState, Emitted]:
    """Read the prompts of some rows, and after each a text that it may continue with.

    A draft is, for example, what the row's seed gave under other weights. Prompt and draft are read
    together, ``width`` tokens at a time. At each position of the draft the target's own token is
    sampled, with the noise of the row's seed there. The longest part of the draft that agrees is
    kept, then the target's token is taken that does not. From there ``decode`` goes on. In float32
    the text is the same as without a draft, whatever the draft is, and whichever the drafter.

    A draft costs the reading of its tokens, and the LM head over those up to the chunk in which it
    ends. One that is empty makes this prefill_all.

    Args:
      rows: [B] rows that were admitted and have not read their prompts to the end; None: all. Rows
        that are not reading stay unchanged. Padding and data parallelism: see prefill.
      drafts: integers [B, N], without the prompts. A draft ends before the first id that is outside
        the vocabulary, before the last token that the row may have, and where its pages end.
      draft_lens: integers [B], 0 to N.
      width: tokens per row that are read at a time.
      columns, greedy, controls, logprobs, top_logprobs, policy_logprobs, order_invariant: see
        prefill; log-probabilities are of all tokens that were emitted.

    Returns the state, and what the B rows emitted: ``tokens`` int32 [1, B, N + 1], of which the
    first ``counts`` [1, B] are the text so far. ``accepted`` [1, B] are the drafted tokens that
    were kept, ``drafted`` those that were read. ``num_rounds`` is 0. A row that has kept a stop
    token, or has reached its limit, is DONE; another that has read its prompt decodes.

    Raises ValueError as prefill does, for drafts or lengths of another shape or dtype, for known
    lengths outside 0 to N, and for an acceptance rule other than "match": a text of the same seed
    is no independent draft for it.
    """
    check_state(params, state, controls=controls)
    check_sizes(width=width, columns=columns)
    check_policy(policy_logprobs, controls=controls)
    if params.speculation.acceptance != "match":
        raise ValueError('verifying old texts needs the acceptance rule "match"')
    listed = listed_rows(params, state, rows)
    num_rows = len(state.rows.status if listed is None else listed)
    drafts, lens = _checked_drafts(drafts, draft_lens, num_rows)
    options = RoundOptions(
        params.speculation_of(None),
        params.kernels,
        columns=columns,
        greedy=greedy,
        controls=controls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        policy_logprobs=policy_logprobs,
        width=min(width, state.rows.tokens.shape[1]),
        order_invariant=order_invariant,
    )
    options = params.checked_options(options)
    check_order(state, listed)
    given = _of_listed(state.rows.prompt_lens, listed)
    state = _with_drafts(params, state, listed, drafts, lens)
    return _read_all(params, state, options, listed, given, drafts.shape[1] + 1)


def _checked_drafts(drafts: Integers, draft_lens: Integers, num_rows: int) -> tuple[Array, Array]:
    """Drafts [B, N] and lengths [B], int32. Raises ValueError for others."""
    tokens, lens = integers("drafts", drafts, "[B, N]"), integers("draft_lens", draft_lens, "[B]")
    problems, most = ArrayProblems(), tokens.shape[1]
    if len(tokens) != num_rows:
        problems.add(f"drafts has {len(tokens)} rows for {num_rows}: give each row one")
    if len(lens) != num_rows:
        problems.add(f"draft_lens has {len(lens)} entries for {num_rows} rows: give each row one")
    problems.within("draft_lens", lens, lambda x: (x >= 0) & (x <= most), f"drafts have {most}")
    problems.raise_all()
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lens, jnp.int32)


def _of_listed(values: Array, rows: Array | None) -> Array:
    """The values [R] of the listed rows [B]; 0 for padding."""
    if rows is None:
        return values
    inside = (rows >= 0) & (rows < len(values))
    return jnp.where(inside, values[jnp.where(inside, rows, 0)], 0)


def _with_drafts(
    params: EngineParams, state: EngineState, rows: Array | None, drafts: Array, lens: Array
) -> EngineState:
    """The state whose reading rows have their drafts after their prompts, to be read, too."""
    spec = row_spec(params)
    specs = (None if rows is None else spec, spec, spec)
    return on_mesh(_add_drafts, params, state, (rows, drafts, lens), specs, None)


def _add_drafts(
    params: EngineParams, state: EngineState, rows: Array | None, drafts: Array, lens: Array
) -> EngineState:
    before = state.rows
    index = jnp.arange(len(before.status))
    if rows is not None:
        index = local_rows(rows, len(before.status), params.layout.batch)
    chosen = take_rows(before, index)
    vocab, (_, width) = params.target.config.vocab_size, drafts.shape
    bad = (drafts < 0) | (drafts >= vocab)
    lens = jnp.where(jnp.any(bad, axis=1), jnp.minimum(lens, jnp.argmax(bad, axis=1)), lens)
    pages_end = held_slots(chosen.page_table, state.pool.page_size)
    end = jnp.minimum(chosen.prompt_lens + lens, jnp.minimum(chosen.max_lens - 1, pages_end))
    end = jnp.maximum(end, chosen.prompt_lens)  # a prompt may be as long as its limit
    end = jnp.where(chosen.status == Status.READING, end, chosen.prompt_lens)
    place = chosen.prompt_lens[:, None] + jnp.arange(width)
    place = jnp.where(place < end[:, None], place, before.tokens.shape[1])
    row = jnp.arange(len(index))[:, None]
    chosen = chosen.replace(
        tokens=chosen.tokens.at[row, place].set(drafts, mode="drop"), prompt_lens=end
    )
    return state.replace(rows=put_rows(before, index, chosen))


class _Carry(NamedTuple):
    chunks: Array  # int32 [], read so far
    state: EngineState
    emitted: Emitted


def _read_all(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    rows: Array | None,
    given: Array,
    size: int,
) -> tuple[EngineState, Emitted]:
    """The state after all chunks, and what was emitted in them: at most ``size`` tokens a row."""
    counts = jnp.full(len(given), options.width, jnp.int32)

    def read(state: EngineState) -> tuple[EngineState, Emitted]:
        return verify_chunk(params, state, options, rows, counts, given)

    after, emitted = read(state)
    first = _Carry(jnp.int32(1), after, _appended(_empty(emitted, size), emitted))
    # Rows that are listed in another device's part stay unread, so the loop must not wait for them.
    most = -(-state.rows.tokens.shape[1] // options.width)

    def unfinished(carry: _Carry) -> Array:
        reading = _of_listed(carry.state.rows.status, rows) == Status.READING
        return (carry.chunks < most) & jnp.any(reading)

    def next_chunk(carry: _Carry) -> _Carry:
        after, emitted = read(carry.state)
        return _Carry(carry.chunks + 1, after, _appended(carry.emitted, emitted))

    _, state, emitted = lax.while_loop(unfinished, next_chunk, first)
    return state, emitted


PER_TOKEN = (  # [1, B, A, ...]
    *("tokens", "logprobs", "top_tokens", "top_logprobs", "policy_logprobs"),
)


def _empty(like: Emitted, size: int) -> Emitted:
    """Nothing, with place for ``size`` tokens of each row."""

    def wide(x: Array) -> Array:
        return jnp.zeros((*x.shape[:2], size, *x.shape[3:]), x.dtype)

    arrays = {name: jax.tree.map(wide, getattr(like, name)) for name in PER_TOKEN}
    none = jnp.zeros_like(like.counts)
    return like.replace(**arrays, counts=none, accepted=none, drafted=none)


def _appended(before: Emitted, new: Emitted) -> Emitted:
    """What was emitted before, and then by one more chunk."""
    size, width = before.tokens.shape[2], new.tokens.shape[2]
    index = jnp.arange(width)
    place = jnp.where(index < new.counts[..., None], before.counts[..., None] + index, size)
    row = jnp.arange(place.shape[1])[None, :, None]

    def put(old: Array, x: Array) -> Array:
        return old.at[0, row, place].set(x, mode="drop")

    arrays = {
        name: jax.tree.map(put, getattr(before, name), getattr(new, name)) for name in PER_TOKEN
    }
    return new.replace(
        **arrays,
        counts=before.counts + new.counts,
        accepted=before.accepted + new.accepted,
        drafted=before.drafted + new.drafted,
    )
