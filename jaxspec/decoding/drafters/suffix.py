"""Suffix drafting (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975), without weights.

The longest earlier match of a row's last tokens may have occurred several times. What followed each
occurrence votes: a path of the draft is as likely as the share of occurrences that continue so.
Texts of requests that ended may be searched, too.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.checks import check_count, is_number
from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.drafters.base import DraftState, Proposed, StatelessDrafter
from jaxspec.decoding.drafters.matching import (
    check_limits,
    latest_places,
    lengths_in_past,
    match_lengths,
)
from jaxspec.decoding.past_text import GAP, PastText
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree, make_tree
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.pytree import pytree, static

MOST_PAST = 2**24  # tokens of past text: all are compared in every round


class Occurrences(NamedTuple):
    """The latest O occurrences of each row's longest match, the latest first."""

    following: Array  # int32 [B, O, D], the tokens after each; negative past the end of a text
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
    """Drafts what followed the longest earlier match of the row's last tokens.

    The match is in the same row, or, if a longer one is there, in the past text: outputs of earlier
    requests, as far as ``past`` tokens hold them.

    The likeliest paths form the tree, best first, up to the call's nodes and depth; of equally
    likely ones the shallower, then the one that occurred last. ``top_k`` does not limit a node's
    children, but with 1 the draft is one path: the likeliest token after each token. A row without
    a match drafts nothing. A round compares ``max_match`` times all B * S tokens of the rows, as
    n-gram lookup does, and groups occurrences in B * O * O comparisons (and bools) for each depth,
    with ``max_occurrences`` O. Past text adds ``max_match`` times B * ``past``. The drafter keeps
    nothing between rounds; the pool has the past text (see functional.remember).

    Attributes:
      min_match: fewest tokens of a match.
      max_match: most tokens that are compared.
      factor: a draft is at most ``factor`` times as deep as its match is long.
      min_probability: a path is drafted if at least this share of the occurrences continues so.
      max_occurrences: of more than these, the latest count.
      past: most tokens of past text, of 4 bytes each; 0: none, so that requests do not touch.
    """

    min_match: int = static(default=1)
    max_match: int = static(default=24)
    factor: float = static(default=1.0)
    min_probability: float = static(default=0.1)
    max_occurrences: int = static(default=64)
    past: int = static(default=0)

    def __post_init__(self):
        check_limits(self.min_match, self.max_match)
        if not (is_number(self.factor) and self.factor > 0):
            raise ValueError(f"factor must be a number above 0, got {self.factor!r}")
        if not (is_number(self.min_probability) and 0 <= self.min_probability <= 1):
            raise ValueError(f"min_probability must be 0 to 1, got {self.min_probability!r}")
        check_count("max_occurrences", self.max_occurrences)
        whole = isinstance(self.past, int) and not isinstance(self.past, bool)
        if not whole or not 0 <= self.past <= MOST_PAST:
            raise ValueError(f"past must be 0 to {MOST_PAST} tokens, got {self.past!r}")

    @property
    def past_tokens(self) -> int:
        return self.past

    def propose(self, target: Decoder, state: EngineState, options: RoundOptions) -> Proposed:
        """A tree of at most ``options.speculation``'s nodes and depth, from ``state.rows.tokens``
        (int32 [B, S]). Its tokens are not drawn: ``probs`` is None."""
        rows, shape = state.rows, options.speculation
        found = self._look_up(rows.tokens, rows.context_lens, shape.max_depth)
        if state.pool.past is not None:
            found = _longer(found, self._look_up_past(state.pool.past, state, shape.max_depth))
        candidates = self._candidates(found, one_path=shape.is_chain)
        return _best(rows.roots, candidates, shape), DraftState()

    def _look_up(self, tokens: Array, end: Array, depth: int) -> Occurrences:
        """From tokens [B, S] of which the one at ``end`` [B] is the last."""
        place, longest = self._latest(match_lengths(tokens, end, self.max_match))
        # What follows a match near the end reaches the end, and then goes on from its start:
        # text that repeats every few tokens gets a whole path.
        period = jnp.maximum(end[:, None] - place, 1)[..., None]
        source = place[..., None] + 1 + jnp.arange(depth) % period  # [B, O, D]
        following = jnp.take_along_axis(tokens, source.reshape(len(tokens), -1), axis=1)
        return Occurrences(following.reshape(source.shape), place >= 0, longest)

    def _look_up_past(self, past: PastText, state: EngineState, depth: int) -> Occurrences:
        text, rows = past.in_order, state.rows
        place, longest = self._latest(
            lengths_in_past(text, rows.tokens, rows.context_lens, self.max_match)
        )
        source = place[..., None] + 1 + jnp.arange(depth)  # past the last text is none
        following = jnp.take(text, source, mode="fill", fill_value=GAP)
        return Occurrences(following, place >= 0, longest)

    def _latest(self, lengths: Array) -> tuple[Array, Array]:
        """Where the longest match ends: the latest places int32 [B, O], -1 where there are fewer,
        and its length int32 [B]. ``lengths`` are int32 [B, S]."""
        longest = jnp.max(lengths, axis=1)
        longest = jnp.where(longest >= self.min_match, longest, 0)
        found = (lengths == longest[:, None]) & (longest > 0)[:, None]
        return latest_places(found, self.max_occurrences), longest

    def _candidates(self, found: Occurrences, *, one_path: bool) -> Candidates:
        _, size, depth = found.following.shape
        total = jnp.sum(found.valid, axis=1, keepdims=True)
        same = found.valid[:, :, None] & found.valid[:, None, :]  # occurrences that agree so far
        index = jnp.arange(size)
        parent = jnp.zeros_like(found.following[:, :, 0])
        counts, parents = [], []
        for level in range(depth):
            token = found.following[:, :, level]
            same &= (token[:, :, None] == token[:, None, :]) & (token >= 0)[:, None, :]
            if one_path:
                best = jnp.argmax(jnp.sum(same, axis=2), axis=1)[:, None, None]
                same &= jnp.take_along_axis(same, best, axis=1)
            count = jnp.sum(same, axis=2)
            latest = jnp.argmax(same, axis=2)  # it stands for all occurrences of its path
            likely = count >= jnp.maximum(self.min_probability * total, 1)
            within = level + 1 <= self.factor * found.match[:, None]
            counts.append(jnp.where((latest == index) & likely & within, count, 0))
            parents.append(parent)
            parent = 1 + level * size + latest
        tokens = jnp.maximum(jnp.swapaxes(found.following, 1, 2), 0).reshape(-1, depth * size)
        return Candidates(tokens, *(jnp.concatenate(x, axis=1) for x in (parents, counts)))


def _longer(in_row: Occurrences, past: Occurrences) -> Occurrences:
    """The occurrences of the longer match in each row; of equally long ones, those in the row."""
    prefer_row = in_row.match >= past.match
    return Occurrences(
        jnp.where(prefer_row[:, None, None], in_row.following, past.following),
        jnp.where(prefer_row[:, None], in_row.valid, past.valid),
        jnp.where(prefer_row, in_row.match, past.match),
    )


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
