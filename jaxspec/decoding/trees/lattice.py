"""Chains and trees from a block of logits, one row of them for each depth.

The logits of a depth do not depend on the tokens before, so a block is a lattice: every path takes
one token of each depth, and its log-probability is the sum of theirs. The likeliest paths make the
tree. So they do where logits depend on the token before, among a few candidates of each depth
(``pair_tree``). Where a correction makes them depend, ``grow.grow`` grows it level by level, and
its ``top_k`` beams may miss some of the likeliest paths.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.trees.grow import (
    Candidates,
    Proposer,
    check_top_k,
    drawn_chain,
    rerank,
)
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.models.heads.corrections import PairScores
from pallas_kernels.top_k.reference import best_with


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
        tokens, log_probs = (x[:, :, None] for x in proposer.children(logits, depths))
        levels = Levels(tokens, log_probs, jnp.zeros_like(tokens))  # the same behind all tokens
        return rerank(roots, best_paths(levels, spec), spec)
    tokens, probs = proposer.next_token(logits, depths)
    return drawn_chain(jnp.concatenate([roots[:, None], tokens], axis=1), [probs])


def pair_tree(proposer: Proposer, roots: Array, scores: PairScores) -> DraftTree:
    """``lattice_tree`` where the logits of a depth depend on the token before, and a few tokens of
    each depth are candidates. The tree's paths are the likeliest, too.

    Raises ValueError for a ``top_k`` above the number of candidates.
    """
    spec, (batch, depths, size) = proposer.speculation, scores.tokens.shape
    check_top_k(spec, size, "candidates")
    first = jnp.broadcast_to(scores.first[:, None, None], (batch, 1, size, size))
    logits = jnp.concatenate([first, scores.pairs], axis=1).reshape(batch, -1, size)
    among = proposer.among(jnp.repeat(scores.tokens, size, axis=1))  # of each candidate before
    depth = jnp.repeat(1 + jnp.arange(depths), size)
    if not spec.is_chain:
        places, log_probs = among.best(logits, depth)  # [B, depths * K, k]
        found = among.target_ids(places), log_probs, places
        levels = (x.reshape(batch, depths, size, -1) for x in found)
        return rerank(roots, best_paths(Levels(*levels), spec), spec)
    places, probs = among.chosen(logits, depth)
    path = _walked(places.reshape(batch, depths, size))
    tokens = jnp.take_along_axis(scores.tokens, path[..., None], axis=2)[..., 0]
    if probs is not None:
        before = jnp.pad(path[:, :-1], ((0, 0), (1, 0))) + size * jnp.arange(depths)
        probs = jnp.take_along_axis(probs, before[..., None], axis=1)
        probs = proposer.among(scores.tokens).over_target_vocab(probs)
    return drawn_chain(jnp.concatenate([roots[:, None], tokens], axis=1), [probs])


def _walked(places: Array) -> Array:
    """The places along a chain, int32 [B, T], from the place of the token after each place, int32
    [B, T, K]. The first is the same for all."""
    path = [places[:, 0, 0]]
    for depth in range(1, places.shape[1]):
        path.append(jnp.take_along_axis(places[:, depth], path[-1][:, None], axis=1)[:, 0])
    return jnp.stack(path, axis=1)


class Levels(NamedTuple):
    """The k best tokens of each depth behind each of P tokens of the depth before, the best first.

    Attributes:
      tokens: int32 [B, T, P, k]
      log_probs: float32 [B, T, P, k]
      places: int32 [B, T, P, k], which of the P rows of the next depth are behind a token.
    """

    tokens: Array
    log_probs: Array
    places: Array


def best_paths(levels: Levels, shape: TreeShape) -> list[Candidates]:
    """The likeliest paths of each depth, as many as the tree may have nodes.

    The path that a node ends scores no more than the path to its parent, so no other path can be in
    the tree. The rows of the first depth are equal.
    """
    most, row = shape.num_nodes - 1, jnp.arange(len(levels.tokens))[:, None]
    tokens, scores, places = (x[:, 0, 0, :most] for x in levels)
    candidates = [Candidates(tokens, scores, jnp.zeros_like(tokens))]  # their parent is the root
    first = 1  # candidate number of the level's first
    for depth in range(1, levels.tokens.shape[1]):
        tokens, log_probs, next_places = (x[row, depth, places] for x in levels)  # [B, m, k]
        totals = _flatten(scores[:, :, None] + log_probs)
        index = jnp.broadcast_to(jnp.arange(totals.shape[1]), totals.shape)
        found = best_with(totals, min(most, totals.shape[1]), (_flatten(next_places), index))
        scores, places, picked = found
        tokens = tokens[row, picked // log_probs.shape[2], picked % log_probs.shape[2]]
        parents = first + picked // log_probs.shape[2]
        first += log_probs.shape[1]
        candidates.append(Candidates(tokens, scores, parents))
    return candidates


def _flatten(x: Array) -> Array:
    return x.reshape(len(x), -1)
