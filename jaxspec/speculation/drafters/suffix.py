"""Suffix drafting (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975), without weights.

The longest earlier match of a row's last tokens may have occurred several times. What followed each
occurrence votes: a path of the draft is as likely as the share of occurrences that continue so.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.speculation import TreeShape
from jaxspec.models.decoder import Decoder
from jaxspec.pytree import pytree, static
from jaxspec.speculation.call import Call
from jaxspec.speculation.drafters.base import DraftState, StatelessDrafter
from jaxspec.speculation.drafters.matching import match_lengths
from jaxspec.speculation.tree import DraftTree, make_tree
from jaxspec.state import EngineState


class Occurrences(NamedTuple):
    """The latest O occurrences of each row's longest match, the latest first."""

    following: Array  # int32 [B, O, D], the tokens after each
    valid: Array  # bool [B, O]
    match: Array  # int32 [B], tokens of the match, 0 if there is none


class Candidates(NamedTuple):
    """Paths that continued a match: D depths of O each, shallow ones first; C = D * O.

    Paths of one depth are in the order of their latest occurrence, the latest first. Candidates are
    numbered from 1; 0 is the root.
    """

    tokens: Array  # int32 [B, C], the last token of each path
    parents: Array  # int32 [B, C], the candidate that it continues
    counts: Array  # int32 [B, C], occurrences that continue so; 0: there is no such path


@pytree
class SuffixDrafter(StatelessDrafter):
    """Drafts what followed the longest earlier match of the row's last tokens, in the same row.

    The likeliest paths form the tree, best first, up to the call's nodes and depth; of equally
    likely ones the shallower, then the one that occurred last. ``top_k`` does not limit a node's
    children, but with 1 the draft is one path: the likeliest token after each token. A row without
    a match drafts nothing. A round compares ``max_match`` times all B * S tokens of the rows, as
    n-gram lookup does, and groups occurrences in B * O * O comparisons (and bools) for each depth,
    with ``max_occurrences`` O. It keeps nothing between rounds.

    Attributes:
      min_match: fewest tokens of a match.
      max_match: most tokens that are compared.
      factor: a draft is at most ``factor`` times as deep as its match is long.
      min_probability: a path is drafted if at least this share of the occurrences continues so.
      max_occurrences: of more than these, the latest count.
    """

    min_match: int = static(default=1)
    max_match: int = static(default=24)
    factor: float = static(default=1.0)
    min_probability: float = static(default=0.1)
    max_occurrences: int = static(default=64)

    def propose(
        self, target: Decoder, state: EngineState, call: Call
    ) -> tuple[DraftTree, DraftState]:
        """A tree of at most ``call.speculation``'s nodes and depth, from ``state.rows.tokens``
        (int32 [B, S]). Its tokens are not drawn: ``probs`` is None."""
        rows, shape = state.rows, call.speculation
        found = self._look_up(rows.tokens, rows.context_lens, shape.max_depth)
        candidates = self._candidates(found, one_path=shape.is_chain)
        return _best(rows.roots, candidates, shape), DraftState()

    def _look_up(self, tokens: Array, end: Array, depth: int) -> Occurrences:
        """From tokens [B, S] of which the one at ``end`` [B] is the last."""
        size = tokens.shape[1]
        lengths = match_lengths(tokens, end, self.max_match)
        longest = jnp.max(lengths, axis=1, keepdims=True)
        longest = jnp.where(longest >= self.min_match, longest, 0)
        ends = jnp.where((lengths == longest) & (longest > 0), jnp.arange(size), -1)
        place, _ = lax.top_k(ends, min(self.max_occurrences, size))
        # What follows a match near the end reaches the end, and then goes on from its start:
        # text that repeats every few tokens gets a whole path.
        period = jnp.maximum(end[:, None] - place, 1)[..., None]
        source = place[..., None] + 1 + jnp.arange(depth) % period  # [B, O, D]
        following = jnp.take_along_axis(tokens, source.reshape(len(tokens), -1), axis=1)
        return Occurrences(following.reshape(source.shape), place >= 0, longest[:, 0])

    def _candidates(self, found: Occurrences, *, one_path: bool) -> Candidates:
        _, size, depth = found.following.shape
        total = jnp.sum(found.valid, axis=1, keepdims=True)
        same = found.valid[:, :, None] & found.valid[:, None, :]  # occurrences that agree so far
        own = jnp.arange(size)
        parent = jnp.zeros_like(found.following[:, :, 0])
        counts, parents = [], []
        for level in range(depth):
            token = found.following[:, :, level]
            same &= token[:, :, None] == token[:, None, :]
            if one_path:
                best = jnp.argmax(jnp.sum(same, axis=2), axis=1)[:, None, None]
                same &= jnp.take_along_axis(same, best, axis=1)
            count = jnp.sum(same, axis=2)
            latest = jnp.argmax(same, axis=2)  # it stands for all occurrences of its path
            likely = count >= jnp.maximum(self.min_probability * total, 1)
            within = level + 1 <= self.factor * found.match[:, None]
            counts.append(jnp.where((latest == own) & likely & within, count, 0))
            parents.append(parent)
            parent = 1 + level * size + latest
        tokens = jnp.swapaxes(found.following, 1, 2).reshape(-1, depth * size)
        return Candidates(tokens, *(jnp.concatenate(x, axis=1) for x in (parents, counts)))


def _best(roots: Array, candidates: Candidates, shape: TreeShape) -> DraftTree:
    """The tree of the likeliest candidates below ``roots`` [B].

    A path is at least as likely as those that continue it and comes before them, and of equal
    values top_k takes the first ones: the parents of all chosen candidates are chosen too.
    """
    size = min(shape.num_nodes - 1, candidates.counts.shape[1])
    counts, picked = lax.top_k(candidates.counts, size)
    token, parent = (
        jnp.take_along_axis(x, picked, axis=1) for x in (candidates.tokens, candidates.parents)
    )
    # Node i + 1 is the candidate picked[i] + 1.
    node = jnp.argmax(picked[:, None, :] + 1 == parent[:, :, None], axis=2) + 1
    parent = jnp.where(parent == 0, 0, node)
    return make_tree(
        jnp.concatenate([roots[:, None], token], axis=1),
        jnp.concatenate([jnp.full_like(roots, -1)[:, None], parent], axis=1),
        1 + jnp.sum(counts > 0, axis=1),
        shape.max_depth,
        is_chain=shape.is_chain,
    )
