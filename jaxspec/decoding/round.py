"""One round: draft a tree, verify it in one target pass, accept a path, commit it to the caches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import CommittedPath, LayerStates, page_slots
from jaxspec.decoding.acceptance import Accepted, Verified, acceptance_rule, checked_outcome
from jaxspec.decoding.drafters.base import Drafter, with_draft
from jaxspec.decoding.drafters.checks import checked_proposal, checked_state
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import (
    History,
    Logprobs,
    control_logits,
    policy_logprobs,
    process_logits,
    token_logprobs,
)
from jaxspec.decoding.state import (
    Ending,
    EngineState,
    RoundTrees,
    Rows,
    Statistics,
    Status,
    write_tokens,
)
from jaxspec.decoding.token_masks import restrict
from jaxspec.decoding.trees.tree import DraftTree, pad_tree, path_tokens, root_only
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.pipeline_stage import Passage
from jaxspec.parallel import collectives
from pallas_kernels.selection import fewest_rows


class RoundOutput(NamedTuple):
    """The tokens that a round committed. A = the call's max_depth + 1."""

    tokens: Array  # int32 [R, A]
    counts: Array  # int32 [R] tokens committed
    accepted: Array  # int32 [R] drafted tokens accepted
    drafted: Array  # int32 [R] drafted tokens verified
    logprobs: Logprobs | None  # [R, A] each, of ``tokens``
    hidden: Array | None  # [R, A, n * H], at the node that each token was sampled from
    trees: RoundTrees | None  # of this round: without the axis of rounds
    confidence: Array | None  # float32 [R, A - 1], see DraftTree
    policy_logprobs: Array | None  # float32 [R, A], of ``tokens``
    committed: CommittedPath | None = None  # of a single round


class Scores(NamedTuple):
    """The results of a verification, for every node."""

    logits: Array  # float32 [R, N, V / shards], raw
    features: Array | None  # [R, N, C], hidden states that the drafter captures
    hidden: Array | None  # [R, N, n * H], hidden states that the caller asked for
    layers: LayerStates


def run_round(
    target: Decoder, drafter: Drafter, options: RoundOptions, state: EngineState
) -> tuple[EngineState, RoundOutput]:
    """Commit between 1 and max_depth + 1 tokens of every row that is decoding.

    Raises ValueError if the drafter's tree is larger than the call's.
    """
    tree, state = draft_tree(target, drafter, options, state)
    return verify_tree(target, drafter, options, state, tree)


def verify_tree(
    target: Decoder,
    drafter: Drafter,
    options: RoundOptions,
    state: EngineState,
    tree: DraftTree,
    masks: Array | None = None,
    before: Passage | None = None,
) -> tuple[EngineState, RoundOutput]:
    """The second half of a round: score a tree of draft_tree, accept a path and commit it.

    ``masks`` uint32 [R, N, W] (see token_masks) say which tokens may be sampled after each node.
    ``before``: its passage of a pipeline.
    """
    scores = verify(target, state, tree, options, drafter.capture, before)
    logits = scores.logits if masks is None else restrict(scores.logits, masks, target.layout)
    logits = _controlled(tree, logits, options, state, target)
    accepted = accept(tree, logits, options, state, target)
    counts, ending = _limit(accepted, state, _finite(accepted, logits, target))
    rows, path = state.rows, accepted.path
    committed = CommittedPath(
        rows=rows.index,
        page_table=rows.page_table,
        context_lens=rows.context_lens,
        path=path,
        counts=counts,
        is_chain=tree.is_chain,
    )
    cache = state.pool.target.replace(layers=scores.layers).commit(committed, options.kernels)
    with jax.named_scope("draft"):
        draft = drafter.commit(state, scores.features, path, counts, options)
        draft = checked_state(drafter, "commit", state, draft)
    output = _output(tree, scores, accepted, committed, rows, options, target)
    done = rows.active & (ending != Ending.NONE)
    rows = rows.replace(
        status=jnp.where(done, Status.DONE, rows.status),
        ending=jnp.where(done, ending, rows.ending),
        tokens=write_tokens(rows, accepted.tokens, counts),
        context_lens=rows.context_lens + counts,
        draft=draft.rows,
        stats=_count(rows.stats, rows.active, tree, accepted),
    )
    pool = state.pool.replace(target=cache, draft=draft.pool)
    return state.replace(pool=pool, rows=rows), output


@jax.named_scope("draft")
def draft_tree(
    target: Decoder, drafter: Drafter, options: RoundOptions, state: EngineState
) -> tuple[DraftTree, EngineState]:
    """The first half of a round: the tree to verify, padded to its final width, and the state
    after drafting.

    Raises ValueError if the drafter's tree is larger than the call's.
    """
    shape = options.speculation
    if shape.is_plain:
        tree = root_only(state.rows.roots)
    else:
        proposal = drafter.propose(target, state, options)
        tree, draft = checked_proposal(drafter, options, state, proposal)
        size, depth = tree.tokens.shape[1], tree.max_depth
        if size > shape.num_nodes or depth > shape.max_depth:
            raise ValueError(
                f"{type(drafter).__name__} proposed a tree of {size} nodes and depth {depth}, but "
                f"the call takes at most {shape.num_nodes} nodes and depth {shape.max_depth}"
            )
        state = with_draft(state, draft)
    batch, size = tree.tokens.shape
    least = max(size, -(-fewest_rows(options.kernels) // batch))
    return pad_tree(tree, shape.verify_width or least), state


@jax.named_scope("verify")
def verify(
    target: Decoder,
    state: EngineState,
    tree: DraftTree,
    options: RoundOptions,
    capture: tuple[int, ...] = (),
    before: Passage | None = None,
) -> Scores:
    """Score every node in one target pass. ``before``: its passage of a pipeline."""
    attend = tree_attend(state, tree, options)
    hidden, layers, captured = decoder.run(
        target,
        tree.tokens if before is None else before,
        attend.positions,
        state.pool.target.layers,
        attend,
        (*capture, *options.hidden),
        options.kernels,
        isolate_blocks=options.isolate_blocks,
    )
    asked_for = len(options.hidden) * target.config.hidden_size
    features, asked = split_captured(captured, len(capture), asked_for)
    logits = decoder.logits(target, hidden, options.kernels, isolate_blocks=options.isolate_blocks)
    return Scores(logits, features, asked, layers)


def tree_attend(state: EngineState, tree: DraftTree, options: RoundOptions) -> PagedAttend:
    """Attention of a tree's nodes. Node i is written to slot ``context_lens + i``."""
    rows = state.rows
    index = jnp.arange(tree.tokens.shape[1])
    context = rows.context_lens[:, None]
    valid = (index < tree.num_nodes[:, None]) & rows.active[:, None]
    return PagedAttend(
        rows=rows.index,
        page_table=rows.page_table,
        context_lens=rows.context_lens,
        slots=page_slots(rows.page_table, context + index, valid, state.pool.page_size),
        positions=context + tree.depth,
        kv_lens=rows.context_lens + tree.num_nodes,
        ancestors=tree.ancestors,
        order_invariant=options.speculation.verify_width is not None,
    )


def split_captured(
    captured: Array | None, num_drafter: int, width_asked: int
) -> tuple[Array | None, Array | None]:
    """Captured states [..., C]: those of the drafter, and the last ones, that the caller asked
    for."""
    if captured is None or not num_drafter or not width_asked:
        return (captured, None) if num_drafter else (None, captured)
    first = captured.shape[-1] - width_asked
    return captured[..., :first], captured[..., first:]


@jax.named_scope("accept")
def _controlled(
    tree: DraftTree, logits: Array, options: RoundOptions, state: EngineState, target: Decoder
) -> Array:
    """Raw target logits [R, N, V / shards] with bias and penalties, of each node's own path."""
    rows, controls = state.rows, state.controls
    if not options.controls or controls is None:
        return logits
    history = History(rows.tokens, rows.context_lens + 1, path_tokens(tree))
    return control_logits(logits, controls, history, rows.stop_tokens, target.layout)


@jax.named_scope("accept")
def accept(
    tree: DraftTree, logits: Array, options: RoundOptions, state: EngineState, target: Decoder
) -> Accepted:
    """Apply the acceptance rule to the target's logits [R, N, V / shards], not yet processed."""
    rows, layout = state.rows, target.layout
    processed = process_logits(
        logits, rows.sampling, layout, greedy=options.greedy, kernels=options.kernels
    )
    verified = Verified(tree, processed, rows.sampling, rows.context_lens, layout, options.greedy)
    rule = acceptance_rule(options.speculation.acceptance)
    return checked_outcome(rule, tree, rule.accept(verified))


@jax.named_scope("accept")
def _finite(accepted: Accepted, logits: Array, target: Decoder) -> Array:
    """Whether the target's logits at each node of the path are finite: bool [R, A]."""
    if accepted.finite is not None:
        return accepted.finite
    finite = collectives.all_finite(logits, target.layout)
    return jnp.take_along_axis(finite, accepted.path, axis=1)


@jax.named_scope("accept")
def _limit(accepted: Accepted, state: EngineState, finite: Array) -> tuple[Array, Array]:
    """Number of tokens to commit, and why a row ends: (counts, Ending), int32 [R].

    Tokens are cut after the first stop token, at max_lens, and before the first token sampled from
    logits that are not finite.
    """
    rows, width = state.rows, accepted.tokens.shape[1]
    tokens_left = rows.max_lens - rows.context_lens - 1
    offset = jnp.arange(width)
    wanted = jnp.minimum(accepted.depth + 1, tokens_left)
    is_stop = jnp.any(accepted.tokens[..., None] == rows.stop_tokens[:, None], axis=-1)
    ends = jnp.stack([~finite, is_stop], axis=1)  # [R, 2, A]
    first_broken, first_stop = jnp.min(jnp.where(ends, offset, width), axis=-1).T
    usable = jnp.minimum(wanted, first_broken)
    counts = jnp.minimum(usable, first_stop + 1)
    ending = jnp.where(counts < tokens_left, Ending.NONE, Ending.LENGTH)
    ending = jnp.where(first_broken < wanted, Ending.NOT_FINITE, ending)
    ending = jnp.where(first_stop < usable, Ending.STOP, ending)
    return jnp.where(rows.active, counts, 0), ending


def _count(stats: Statistics, active: Array, tree: DraftTree, accepted: Accepted) -> Statistics:
    place = jnp.arange(stats.counts.shape[1])
    reached = place - 2 <= accepted.depth[:, None]  # rounds and places of ``accepted``
    new = jnp.where(place == 1, tree.num_nodes[:, None] - 1, reached)
    return Statistics(counts=stats.counts + jnp.where(active[:, None], new, 0))


def _output(
    tree: DraftTree,
    scores: Scores,
    accepted: Accepted,
    committed: CommittedPath,
    rows: Rows,
    options: RoundOptions,
    target: Decoder,
) -> RoundOutput:
    once, path = rows.active.astype(jnp.int32), accepted.path
    missing = options.speculation.max_depth + 1 - path.shape[1]

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))

    logprobs = of_policy = hidden = None
    if options.logprobs or options.policy_logprobs:
        at_path = jnp.take_along_axis(scores.logits, path[..., None], axis=1)
        given, layout, kernels = accepted.tokens, target.layout, options.kernels
        if options.logprobs:
            logprobs = token_logprobs(at_path, given, options.top_logprobs, layout, kernels)
            logprobs = jax.tree.map(padded, logprobs)
        if options.policy_logprobs:
            how = {"greedy": options.greedy, "kernels": kernels}
            of_policy = padded(policy_logprobs(at_path, given, rows.sampling, layout, **how))
    if scores.hidden is not None:
        hidden = padded(jnp.take_along_axis(scores.hidden, path[..., None], axis=1))
    return RoundOutput(
        tokens=padded(accepted.tokens),
        counts=committed.counts,
        accepted=once * accepted.depth,
        drafted=once * (tree.num_nodes - 1),
        logprobs=logprobs,
        hidden=hidden,
        trees=_trees(tree, scores.logits, path, options, target) if options.trees else None,
        confidence=tree.confidence,
        policy_logprobs=of_policy,
        committed=committed,
    )


def _trees(
    tree: DraftTree, logits: Array, path: Array, options: RoundOptions, target: Decoder
) -> RoundTrees:
    """The tree at the width of the call's shape; logits float32 [R, N, V / shards], raw."""
    shape, size = options.speculation, tree.tokens.shape[1]
    at_parents = jnp.take_along_axis(logits, jnp.maximum(tree.parents, 0)[..., None], axis=1)
    scores = token_logprobs(at_parents, tree.tokens, 0, target.layout, options.kernels)

    def fitted(nodes: Array, fill: int = 0) -> Array:
        padding = max(0, shape.num_nodes - size)
        padded = jnp.pad(nodes, ((0, 0), (0, padding)), constant_values=fill)
        return padded[:, : shape.num_nodes]  # what is cut off is padding

    return RoundTrees(
        tokens=fitted(tree.tokens),
        parents=fitted(tree.parents, -1),
        num_nodes=tree.num_nodes,
        path=jnp.pad(path, ((0, 0), (0, shape.max_depth + 1 - path.shape[1]))),
        logprobs=fitted(scores.given),
    )
