"""One round: draft a tree, verify it in one target pass, accept a path, compact the cache."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import compact, page_slots
from jaxspec.config import SpeculationConfig
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import process_logits
from jaxspec.speculation.acceptance import (
    Accepted,
    accept_match,
    accept_rejection,
    accept_synthetic,
)
from jaxspec.speculation.drafters import Drafter
from jaxspec.speculation.tree import DraftTree, pad_tree
from jaxspec.state import EngineState, Statistics, write_tokens
from pallas_kernels.tuning import fewest_rows


def run_round(
    target: Decoder, drafter: Drafter, speculation: SpeculationConfig, state: EngineState
) -> EngineState:
    """Commit between 1 and max_depth + 1 tokens of every active sequence."""
    with jax.named_scope("draft"):
        tree, draft = drafter.propose(target, state)
    invariant = speculation.verify_width is not None
    batch, size = tree.tokens.shape
    least = max(size, -(-fewest_rows() // batch))
    tree = pad_tree(tree, speculation.verify_width or least)
    logits, features, cache = verify(
        target, state, tree, drafter.capture, order_invariant=invariant
    )
    accepted = accept(tree, logits, speculation, state, target.axis)
    counts, active = _limit(accepted, state)
    if not tree.is_chain:
        cache = _compact(state, cache, accepted.path, counts)
    with jax.named_scope("draft"):
        draft = drafter.commit(draft, features, accepted.path, counts, state.active)
    return EngineState(
        tokens=write_tokens(state, accepted.tokens, counts),
        context_lens=state.context_lens + counts,
        max_lens=state.max_lens,
        active=active,
        stop_tokens=state.stop_tokens,
        page_table=state.page_table,
        cache=cache,
        draft=draft,
        sampling=state.sampling,
        stats=_count(state, tree, accepted),
    )


@jax.named_scope("verify")
def verify(
    target: Decoder,
    state: EngineState,
    tree: DraftTree,
    capture: tuple[int, ...] = (),
    *,
    order_invariant: bool = False,
) -> tuple[Array, Array | None, tuple]:
    """Score every node in one pass; node i goes to slot ``context_lens + i`` of its sequence.

    Returns (logits [B, N, V / shards], captured features [B, N, C] or None, caches).
    """
    index = jnp.arange(tree.tokens.shape[1])
    context = state.context_lens[:, None]
    positions = context + tree.depth
    valid = (index < tree.num_nodes[:, None]) & state.active[:, None]
    attend = PagedAttend(
        page_table=state.page_table,
        context_lens=state.context_lens,
        slots=page_slots(state.page_table, context + index, valid, state.page_size),
        positions=positions,
        ancestors=tree.ancestors,
        num_nodes=tree.tokens.shape[1],
        order_invariant=order_invariant,
    )
    hidden, cache, features = decoder.run(
        target, tree.tokens, positions, state.cache, attend, capture
    )
    return decoder.logits(target, hidden), features, cache


@jax.named_scope("accept")
def accept(
    tree: DraftTree,
    logits: Array,
    speculation: SpeculationConfig,
    state: EngineState,
    axis: str | None,
) -> Accepted:
    """Apply the acceptance rule to raw target logits [B, N, V / shards]."""
    logits = process_logits(logits, state.sampling, axis)
    arguments = (tree, logits, state.sampling, state.context_lens, axis)
    if speculation.acceptance == "rejection":
        return accept_rejection(*arguments)
    if speculation.synthetic_length is not None:
        return accept_synthetic(*arguments, speculation.synthetic_length)
    return accept_match(*arguments)


@jax.named_scope("accept")
def _limit(accepted: Accepted, state: EngineState) -> tuple[Array, Array]:
    """Tokens to commit, cut at the first stop token and at max_lens: (counts, active), [B]."""
    width = accepted.tokens.shape[1]
    room = state.max_lens - state.context_lens - 1
    counts = jnp.minimum(accepted.depth + 1, room)
    is_stop = jnp.any(accepted.tokens[..., None] == state.stop_tokens[:, None], axis=-1)
    is_stop &= jnp.arange(width) < counts[:, None]
    stopped = jnp.any(is_stop, axis=1)
    counts = jnp.where(stopped, jnp.argmax(is_stop, axis=1) + 1, counts)
    counts = jnp.where(state.active, counts, 0)
    return counts, state.active & ~stopped & (counts < room)


@jax.named_scope("compact")
def _compact(state: EngineState, cache: tuple, path: Array, counts: Array) -> tuple:
    """Move the keys and values of accepted nodes down to the sequence's next slots."""
    depth = jnp.arange(path.shape[1])
    moved = (depth < counts[:, None]) & (path != depth)
    context = state.context_lens[:, None]
    source, destination = (
        page_slots(state.page_table, context + offset, moved, state.page_size)
        for offset in (path, jnp.broadcast_to(depth, path.shape))
    )
    return compact(cache, source, destination)


def _count(state: EngineState, tree: DraftTree, accepted: Accepted) -> Statistics:
    stats, active = state.stats, state.active.astype(jnp.int32)
    reached = jnp.arange(accepted.path.shape[1]) <= accepted.depth[:, None]
    return Statistics(
        rounds=stats.rounds + active,
        drafted=stats.drafted + active * (tree.num_nodes - 1),
        accepted=stats.accepted + active[:, None] * reached,
    )
