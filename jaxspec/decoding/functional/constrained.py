"""A round in two calls, for rows whose tokens the host restricts, node by node.

``draft`` gives the trees. The host says which tokens may follow each node (for example those that
a grammar allows), and ``verify_drafts`` samples under these masks. Together they are one round of
``decode``. Prefill takes the mask of the first token.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxspec.cache import CommittedPath
from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.functional.checks import check_order, check_sizes, check_state
from jaxspec.decoding.functional.decode import (
    max_pending_when_behind,
    read_if_behind,
)
from jaxspec.decoding.functional.params import EngineParams, on_mesh, row_spec, with_found_specs
from jaxspec.decoding.functional.record import emitted_rounds, emitted_specs
from jaxspec.decoding.functional.refusals import rows_to_decode
from jaxspec.decoding.functional.subset import choose_rows, listed_rows, put_back, put_chosen
from jaxspec.decoding.round import draft_tree, verify_tree
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.decoding.token_masks import check_masks
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.models.pipeline_stage import Passage
from jaxspec.parallel import partition_specs
from jaxspec.parallel.array_checks import Integers


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

    Raises ValueError for a shape that is larger than the engine's, and for a list of rows that
    cannot be split over the devices.
    """
    check_state(params, state, controls=controls)
    check_sizes(columns=columns)
    options = RoundOptions(
        params.speculation_of(shape),
        params.kernels,
        columns=columns,
        greedy=greedy,
        controls=controls,
    )
    listed = listed_rows(params, state, rows)
    check_order(state, listed, decodes=True)
    return draft_rows(params, state, options, listed)


def draft_rows(
    params: EngineParams, state: EngineState, options: RoundOptions, rows: Array | None
) -> tuple[EngineState, DraftTree]:
    """Draft trees for rows [B], int32; None: all. See draft."""
    params.check(state, controls=options.controls)
    function = functools.partial(draft_shard, options)
    return with_found_specs(function, params, state, (rows,), _spec_of_rows(params, rows))


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
    options = RoundOptions(
        params.speculation_of(shape),
        params.kernels,
        columns=columns,
        greedy=greedy,
        controls=controls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        hidden=hidden,
        trees=trees,
    )
    options, listed = params.checked_options(options), listed_rows(params, state, rows)
    return verify_rows(params, state, options, listed, tree, jnp.asarray(masks))


def verify_rows(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    rows: Array | None,
    tree: DraftTree,
    masks: Array,
) -> tuple[EngineState, Emitted]:
    """Verify the trees of draft_rows under masks [B, N, W]. See verify_drafts."""
    params.check(state, controls=options.controls)
    batch = state.rows.status.shape if rows is None else rows.shape
    _check_tree(options, tree, batch[0])
    check_masks(masks, tree.tokens.shape, params.target.config.vocab_size)
    check_order(state, rows, decodes=True)
    tree_specs = partition_specs(tree, params.layout)
    specs = (*_spec_of_rows(params, rows), tree_specs, row_spec(params))
    function, emitted = functools.partial(_verify, options), emitted_specs(params, options, state)
    return on_mesh(function, params, state, (rows, tree, masks), specs, emitted)


def _spec_of_rows(params: EngineParams, rows: Array | None) -> tuple[P | None]:
    return (None if rows is None else row_spec(params),)


def _check_tree(options: RoundOptions, tree: DraftTree, batch: int) -> None:
    shape = options.speculation
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


def draft_shard(
    options: RoundOptions, params: EngineParams, state: EngineState, rows: Array | None
) -> tuple[EngineState, DraftTree]:
    """Draft trees on one device's shard."""
    chosen, index = choose_rows(params, state, rows, options.columns)
    chosen = rows_to_decode(options, chosen)
    max_pending = max_pending_when_behind(params, options, chosen)
    if max_pending is not None:
        chosen = read_if_behind(params, options, chosen, max_pending)
    tree, after = draft_tree(params.target, params.drafter, options, chosen)
    return put_back(state, index, after), tree


def _verify(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
    tree: DraftTree,
    masks: Array,
) -> tuple[EngineState, Emitted]:
    after, (emitted, _) = verify_shard(options, params, state, rows, tree, masks)
    return after, emitted


def verify_shard(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    rows: Array | None,
    tree: DraftTree,
    masks: Array | None,
    before: Passage | None = None,
) -> tuple[EngineState, tuple[Emitted, CommittedPath | None]]:
    """Verify trees on one device's shard; ``before``: its passage of a pipeline."""
    chosen, index = choose_rows(params, state, rows, options.columns)
    after, output = verify_tree(params.target, params.drafter, options, chosen, tree, masks, before)
    rounds = jax.tree.map(lambda x: x[None], output._replace(committed=None))
    emitted = emitted_rounds(jnp.int32(1), after, rounds)
    after, emitted = put_chosen(params, state, rows, index, after, emitted)
    return after, (emitted, output.committed)
