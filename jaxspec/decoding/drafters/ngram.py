"""Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"): drafts by n-gram matching, no weights.

The last tokens of the sequence are compared with every earlier position. The tokens after the
longest match (of equal ones, the latest) form a branch of the tree. Each further branch comes from
the best match that continues with a different token.
"""

import jax.numpy as jnp
from jax import Array

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.drafters.base import DraftState, Proposed, StatelessDrafter
from jaxspec.decoding.drafters.matching import check_limits, match_lengths
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree, make_tree
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.pytree import pytree, static


@pytree
class NGramDrafter(StatelessDrafter):
    """Proposes ``top_k`` branches, or fewer if the call's node budget is smaller.

    A match must have at least ``min_match`` tokens; at most ``max_match`` tokens are compared.
    """

    min_match: int = static(default=1)
    max_match: int = static(default=4)

    def __post_init__(self):
        check_limits(self.min_match, self.max_match)

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        rows, shape = state.rows, options.speculation
        tokens, roots, end = rows.tokens, rows.roots, rows.context_lens
        batch = tokens.shape[0]
        scores = self._scores(tokens, end)
        following = jnp.roll(tokens, -1, axis=1)
        node_tokens, node_parents, valid = [roots[:, None]], [jnp.full((batch, 1), -1)], []
        start = 1
        for length in _branch_lengths(shape):
            best = jnp.argmax(scores, axis=1)  # where a match ends
            found = jnp.take_along_axis(scores, best[:, None], axis=1) > 0
            # What follows a match near the end reaches the end, and then goes on from its start:
            # text that repeats every few tokens gets a whole branch.
            period = jnp.maximum(end - best, 1)[:, None]
            source = best[:, None] + 1 + jnp.arange(length) % period
            valid.append(jnp.broadcast_to(found, source.shape))
            node_tokens.append(jnp.take_along_axis(tokens, source, axis=1))
            inner = jnp.arange(start, start + length - 1)
            parents = jnp.concatenate([jnp.zeros(1, inner.dtype), inner])
            node_parents.append(jnp.broadcast_to(parents, (batch, length)))
            scores = jnp.where(following == node_tokens[-1][:, :1], 0, scores)
            start += length
        tree = _packed(node_tokens, node_parents, valid, shape)
        return tree, DraftState()

    def _scores(self, tokens: Array, end: Array) -> Array:
        """Score of each position as the end of a match, 0 if there is none: int32 [B, S]."""
        size = tokens.shape[1]
        length = match_lengths(tokens, end, self.max_match)
        return jnp.where(length >= self.min_match, length * size + jnp.arange(size), 0)


def _branch_lengths(shape: TreeShape) -> list[int]:
    """Nodes of each branch: the budget divided evenly, longest first, at most max_depth each."""
    budget = shape.num_nodes - 1
    branches = min(shape.top_k, budget)
    share, extra = divmod(budget, branches)
    return [min(share + (i < extra), shape.max_depth) for i in range(branches)]


def _packed(
    tokens: list[Array], parents: list[Array], valid: list[Array], shape: TreeShape
) -> DraftTree:
    """The tree of the valid nodes, in order. The valid nodes of each branch are a prefix of it."""
    tokens_, parents_ = jnp.concatenate(tokens, axis=1), jnp.concatenate(parents, axis=1)
    kept = jnp.concatenate([jnp.ones_like(tokens[0], bool), *valid], axis=1)
    order = jnp.argsort(~kept, axis=1, stable=True)
    rank = jnp.cumsum(kept, axis=1) - 1  # new index of a kept node
    parents_ = jnp.where(
        parents_ < 0, -1, jnp.take_along_axis(rank, jnp.maximum(parents_, 0), axis=1)
    )
    return make_tree(
        jnp.take_along_axis(tokens_, order, axis=1),
        jnp.take_along_axis(parents_, order, axis=1),
        jnp.sum(kept, axis=1),
        shape.max_depth,
        is_chain=shape.is_chain,
    )
