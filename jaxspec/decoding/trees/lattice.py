"""Chains and trees from a block of logits, one row of them for each depth.

The logits of a depth do not depend on the tokens before, so a block is a lattice: every path takes
one token of each depth, and its log-probability is the sum of theirs. The likeliest paths make the
tree. Where a correction makes them depend, ``grow.grow`` grows it level by level, and
its ``top_k`` beams may miss some of the likeliest paths.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.trees.grow import (
    Candidates,
    Children,
    Proposer,
    check_top_k,
    drawn_chain,
    rerank,
)
from jaxspec.decoding.trees.tree import DraftTree
from pallas_kernels.top_k.reference import local_top_k


def lattice_tree(proposer: Proposer, roots: Array, logits: Array) -> DraftTree:
    """A tree below ``roots`` [B], of the call's shape.

    A chain takes one token of each depth. A tree has the ``num_nodes - 1`` paths of the largest
    cumulative log-probability (under the noise of the proposal, if it has some), among those that
    take one of the ``top_k`` best tokens of every depth.

    Args:
      logits: [B, max_depth, W / shards] draft logits of the tokens at depths 1, 2, ...

    Raises ValueError for a ``top_k`` above the draft vocabulary.
    """
    spec, depths = proposer.speculation, 1 + jnp.arange(logits.shape[1])
    shards = math.prod(map(jax.lax.axis_size, proposer.layout.vocab))
    check_top_k(spec, logits.shape[-1] * shards)
    if not spec.is_chain:
        return rerank(roots, best_paths(proposer.children(logits, depths), spec), spec)
    tokens, probs = proposer.next_token(logits, depths)
    return drawn_chain(jnp.concatenate([roots[:, None], tokens], axis=1), [probs])


def best_paths(children: Children, shape: TreeShape) -> list[Candidates]:
    """The likeliest paths of each depth, as many as the tree may have nodes.

    ``children`` [B, max_depth, k] are the best tokens of each depth, the best first. The path that
    a node ends scores no more than the path to its parent, so no other path can be in the tree.
    """
    most = shape.num_nodes - 1
    tokens, scores = (x[:, 0, :most] for x in children)
    candidates = [Candidates(tokens, scores, jnp.zeros_like(tokens))]  # their parent is the root
    first = 1  # candidate number of the level's first
    for depth in range(1, children.tokens.shape[1]):
        level_tokens, level_scores = (x[:, depth] for x in children)  # [B, k]
        totals = (scores[:, :, None] + level_scores[:, None, :]).reshape(len(scores), -1)
        parents = first + jnp.arange(totals.shape[1]) // level_scores.shape[1]
        first += scores.shape[1]
        scores, picked = local_top_k(totals, min(most, totals.shape[1]))
        tokens = jnp.take_along_axis(level_tokens, picked % level_scores.shape[1], axis=1)
        candidates.append(Candidates(tokens, scores, parents[picked]))
    return candidates
