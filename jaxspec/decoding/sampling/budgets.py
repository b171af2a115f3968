"""Budgets of reasoning: after so many tokens its end is the only token that may be sampled.

Which token a node forces depends on the tokens before it alone: those of the text and of the path
to the node. A text is then the same with speculation and without.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.config.reasoning import MOST_MARKER, ReasoningBudget
from jaxspec.decoding.sampling.history import History
from jaxspec.parallel.pytree import Pytree, array, pytree

NOWHERE = 2**30  # after all positions


@pytree
class Budgets(Pytree):
    """Budgets of each row, M tokens at most of a marker; see ReasoningBudget."""

    tokens: Array = array("batch")  # int32 [B]; -1: no budget
    begin: Array = array("batch", "marker")  # int32 [B, M], padded with -1
    end: Array = array("batch", "marker")  # int32 [B, M], padded with -1
    inside: Array = array("batch")  # bool [B]
    repeats: Array = array("batch")  # bool [B]

    @property
    def used(self) -> Array:
        """Rows with a budget: bool [B]."""
        return self.tokens >= 0


def make_budgets(rows: Sequence[ReasoningBudget | None]) -> Budgets:
    """Budgets of rows; None: the row has none."""
    size = len(rows)
    begin, end = (np.full((size, MOST_MARKER), -1, np.int32) for _ in range(2))
    for place, row in enumerate(rows):
        if row is not None:
            begin[place, : len(row.begin)] = row.begin
            end[place, : len(row.end)] = row.end
    arrays = {
        "tokens": np.array([-1 if row is None else row.tokens for row in rows], np.int32),
        "begin": begin,
        "end": end,
        "inside": np.array([row is not None and row.inside for row in rows], bool),
        "repeats": np.array([row is not None and row.repeats for row in rows], bool),
    }
    return Budgets(**jax.device_put(arrays))


def forced_tokens(budgets: Budgets, history: History, prompt_lens: Array) -> Array:
    """The only token that may be sampled at each node: int32 [B, N]; -1: any.

    ``prompt_lens`` [B]: tokens that are no part of the text.
    """

    def forced() -> Array:
        return _forced(budgets, history, prompt_lens)

    none = jnp.full(history.path.shape[:2], -1, jnp.int32)
    return lax.cond(jnp.any(budgets.used), forced, lambda: none)


class _Span(NamedTuple):
    """Tokens at consecutive positions, of N nodes or, with N = 1, of all of them."""

    tokens: Array  # int32 [B, N, K], padded with -1
    positions: Array  # int32 [B, N, K]


def _forced(budgets: Budgets, history: History, prompt_lens: Array) -> Array:
    begin, end = budgets.begin, budgets.end
    spans = _text(history, prompt_lens), _path(history, prompt_lens)
    ended = jnp.maximum(*(_last(span, end) for span in spans))  # [B, N]
    after = jnp.where(budgets.repeats[:, None], ended, -1)
    begun = jnp.minimum(*(_next(span, begin, after) for span in spans))
    # The position of the first token of reasoning.
    first = jnp.where(begun < NOWHERE, begun + _lengths(begin)[:, None], NOWHERE)
    inside = budgets.inside[:, None] & (after < 0)
    first = jnp.where(inside, prompt_lens[:, None], first)
    reasons = (first < NOWHERE) & (ended < first)
    spent = reasons & (history.sizes - first >= budgets.tokens[:, None])
    has = _begun(spans[1], end, history.sizes, first)  # tokens of the end marker
    token = jnp.take_along_axis(end, has, axis=1)
    return jnp.where(spent & budgets.used[:, None], token, -1)


def _lengths(marker: Array) -> Array:
    """Tokens of each row's marker: int32 [B]."""
    return jnp.sum(marker >= 0, axis=1)


def _text(history: History, prompt_lens: Array) -> _Span:
    """The committed text, without its prompt."""
    tokens = history.tokens
    place = jnp.arange(tokens.shape[1])
    is_text = (place >= prompt_lens[:, None]) & (place < history.lens[:, None])
    return _Span(jnp.where(is_text, tokens, -1)[:, None], place[None, None])


def _path(history: History, prompt_lens: Array) -> _Span:
    """The tokens of each node's path, and before them the last of the committed text."""
    before, lens = MOST_MARKER - 1, history.lens[:, None]
    place = lens + jnp.arange(-before, 0)  # [B, K]
    last = jnp.take_along_axis(history.tokens, jnp.maximum(place, 0), axis=1)
    last = jnp.where(place >= prompt_lens[:, None], last, -1)[:, None]
    nodes, most = history.path.shape[1:]
    depth = history.sizes - lens  # [B, N]
    upwards = depth[..., None] - 1 - jnp.arange(most)  # places in ``path``, which goes up
    path = jnp.take_along_axis(history.path, jnp.maximum(upwards, 0), axis=2)
    path = jnp.where(upwards >= 0, path, -1)
    tokens = jnp.concatenate([jnp.broadcast_to(last, (*last.shape[:1], nodes, before)), path], 2)
    positions = lens[:, None] + jnp.arange(-before, most)
    return _Span(tokens, jnp.broadcast_to(positions, tokens.shape))


def _matches(span: _Span, marker: Array, *, ends: Array | None = None) -> Array:
    """Whether the marker stands at each position, bool [B, N, K]; with ``ends`` [B, N], positions
    after the last token, its beginning will do."""
    places = jnp.arange(span.tokens.shape[-1])[:, None] + jnp.arange(MOST_MARKER)  # [K, M]
    padded = jnp.pad(span.tokens, ((0, 0), (0, 0), (0, MOST_MARKER)), constant_values=-1)
    wanted = marker[:, None, None]
    same = (wanted < 0) | (padded[..., places] == wanted)  # [B, N, K, M]
    if ends is not None:
        same |= span.positions[..., None] + jnp.arange(MOST_MARKER) >= ends[..., None, None]
    return jnp.all(same, axis=-1) & (marker[:, 0, None, None] >= 0)


def _last(span: _Span, marker: Array) -> Array:
    """The position of the last marker, int32 [B, N]; -1: there is none."""
    return jnp.max(jnp.where(_matches(span, marker), span.positions, -1), axis=-1)


def _next(span: _Span, marker: Array, after: Array) -> Array:
    """The position of the first marker past the positions ``after`` [B, N], int32 [B, N]."""
    found = _matches(span, marker) & (span.positions > after[..., None])
    return jnp.min(jnp.where(found, span.positions, NOWHERE), axis=-1)


def _begun(span: _Span, marker: Array, ends: Array, first: Array) -> Array:
    """How many tokens of the marker each node's path ends with, not before the position ``first``:
    int32 [B, N], less than all of them."""
    start = span.positions
    fits = (start >= first[..., None]) & (start < ends[..., None])
    fits &= start + _lengths(marker)[:, None, None] > ends[..., None]
    found = fits & _matches(span, marker, ends=ends)
    return ends - jnp.min(jnp.where(found, start, ends[..., None]), axis=-1)
