"""A round in two calls, for rows whose tokens the host restricts, node by node.

``draft`` gives the trees. The host says which tokens may follow each node (for example those that
a grammar allows), and ``verify_drafts`` samples under these masks. Together they are one round of
``decode``. Prefill takes the mask of the first token.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.functional.checks import check_order, check_sizes, check_state
from jaxspec.decoding.functional.decode import catch_up, emitted_specs, room_when_behind
from jaxspec.decoding.functional.params import EngineParams, Integers, on_mesh, row_spec
from jaxspec.decoding.functional.refusals import rows_to_decode
from jaxspec.decoding.functional.subset import (
    choose_rows,
    listed_rows,
    put_chosen,
    put_rows,
    take_rows,
    widened,
)
from jaxspec.decoding.round import RoundOutput, draft_tree, verify_tree
from jaxspec.decoding.round_options import Call
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.decoding.token_masks import check_masks
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.parallel import partition_specs


def draft(
    params: EngineParams,
    state: EngineState,
    rows: Integers | None = None,
    *,
    shape: TreeShape | None = None,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
) -> tuple[EngineState, DraftTree]:
    """Draft a tree for some rows: the first half of a round.

    Nothing is committed. Until verify_drafts has got the tree, no other call may change these rows
    (other rows may decode or be read meanwhile).

    Args:
      rows: [B] distinct row indices, as in prefill; trees of padding, and of rows that are not
        decoding, have no meaning. None: all rows.
      shape, columns, greedy, controls: see decode.

    Returns the state, and the trees of the B rows, all of one width N.

    Raises ValueError for a shape that the engine has no room for, and for a list of rows that
    cannot be split over the devices.
    """
    check_state(params, state, controls=controls)
    check_sizes(columns=columns)
    call = params.call(shape, greedy=greedy, controls=controls)
    rows, spec = _listed(params, state, rows)
    check_order(state, rows, decodes=True)
    function = functools.partial(draft_rows, call, columns)
    run = functools.partial(on_mesh, function, params, state, (rows,), spec)
    if params.mesh is None:
        return run(None)
    # The drafter decides the structure of its tree. One spec for all its arrays serves to see it.
    _, structure = jax.eval_shape(lambda: run(row_spec(params)))
    return run(partition_specs(structure, params.layout))


def verify_drafts(
    params: EngineParams,
    state: EngineState,
    tree: DraftTree,
    masks: Array,
    rows: Integers | None = None,
    *,
    shape: TreeShape | None = None,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    hidden: tuple[int, ...] = (),
    trees: bool = False,
) -> tuple[EngineState, Emitted]:
    """Verify trees under masks, and commit: the second half of a round.

    A mask restricts the target's raw logits, before temperature, top-k, top-p and min-p. Under the
    match rule and rejection alike, a token that its parent's mask forbids is never committed, so
    the masks of the nodes below it are never used. Log-probabilities are of the raw logits.

    Args:
      tree: what draft returned for the same rows.
      masks: uint32 [B, N, ceil(V / 32)]; bit ``t % 32`` of word ``t // 32`` says whether token
        ``t`` may follow the node. All ones: no restriction. A row that reaches an empty mask ends
        as NOT_FINITE.
      rows, shape, columns, greedy, controls: as they were given to draft.
      logprobs, top_logprobs, hidden, trees: see decode.

    Returns the state, and what the B rows emitted in this round.

    Raises ValueError for masks of another shape or dtype, and for a tree of another call.
    """
    check_state(params, state, controls=controls)
    check_sizes(columns=columns)
    call = params.call(
        shape,
        greedy=greedy,
        controls=controls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        hidden=hidden,
        trees=trees,
    )
    rows, specs = _listed(params, state, rows)
    masks = jnp.asarray(masks)
    batch = state.rows.status.shape if rows is None else rows.shape
    _check_tree(call, tree, batch[0])
    check_masks(masks, tree.tokens.shape, params.target.config.vocab_size)
    check_order(state, rows, decodes=True)
    specs = (*specs, partition_specs(tree, params.layout), row_spec(params))
    function = functools.partial(_verify, call, columns)
    arguments = (rows, tree, masks)
    return on_mesh(function, params, state, arguments, specs, emitted_specs(params, call))


def _listed(
    params: EngineParams, state: EngineState, rows: Integers | None
) -> tuple[Array | None, tuple]:
    """The rows as an array, and its partition spec."""
    listed = listed_rows(params, state, rows)
    return listed, (None if listed is None else row_spec(params),)


def _check_tree(call: Call, tree: DraftTree, batch: int) -> None:
    shape = call.speculation
    if tree.tokens.shape[0] != batch:
        raise ValueError(
            f"trees of {tree.tokens.shape[0]} rows cannot be verified for {batch} rows: give "
            "verify_drafts the rows of draft"
        )
    if tree.max_depth > shape.max_depth or (tree.max_depth == 0) != shape.is_plain:
        raise ValueError(
            f"the trees have depth {tree.max_depth}, the call's shape {shape.max_depth}: give "
            "verify_drafts the shape of draft"
        )


def draft_rows(
    call: Call,
    columns: int | None,
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
) -> tuple[EngineState, DraftTree]:
    chosen, index = choose_rows(params, state, rows, columns)
    chosen = rows_to_decode(call, chosen)
    if room_when_behind(params, call, chosen) is not None:
        chosen = catch_up(params, call, chosen)
    tree, after = draft_tree(params.target, params.drafter, call, chosen)
    own = state.rows
    if index is None:
        return after.replace(rows=widened(own, after.rows)), tree
    changed = widened(take_rows(own, index), after.rows)
    rows_after = put_rows(own, index, changed)
    return after.replace(rows=rows_after, controls=state.controls), tree


def _verify(
    call: Call,
    columns: int | None,
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
    tree: DraftTree,
    masks: Array,
) -> tuple[EngineState, Emitted]:
    chosen, index = choose_rows(params, state, rows, columns)
    after, output = verify_tree(params.target, params.drafter, call, chosen, tree, masks)
    return put_chosen(params, state, rows, index, after, one_round(after, output))


def one_round(after: EngineState, output: RoundOutput) -> Emitted:
    """What a call of one round emits; ``after``: the rows of the call after it."""
    own = jax.tree.map(lambda x: x[None], output)
    logprobs, top_tokens, top_logprobs = own.logprobs or (None, None, None)
    return Emitted(
        num_rounds=jnp.int32(1),
        tokens=own.tokens,
        counts=own.counts,
        accepted=own.accepted,
        drafted=own.drafted,
        status=after.rows.status,
        ending=after.rows.ending,
        logprobs=logprobs,
        hidden=own.hidden,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        trees=own.trees,
        confidence=own.confidence,
    )
