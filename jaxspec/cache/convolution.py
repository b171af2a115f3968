"""Causal convolutions of channels, over runs and trees of tokens, and the state of a layer that
keeps their inputs alone.

A convolution of width K reads a token's inputs and those of the K - 1 tokens before it. Of a tree's
node these are its ancestors, then committed tokens. So the last K - 1 inputs of each row are all
that is kept, in the order of tokens, and nothing is rolled back: a commit appends the inputs of the
accepted path.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache.layer_state import CommittedPath, Geometry, zeros_like_shapes
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.delta_rule.tokens import select_tokens, take_tokens
from pallas_kernels.selection import Kernels


def convolution(taps: Array, weight: Array) -> Array:
    """Depthwise causal convolution: taps [B, T, K, ...channels], the token itself last, and weight
    [K, ...channels] -> [B, T, ...channels]. Summed in this order, in float32."""
    return _weighted((taps[:, :, place] for place in range(len(weight))), weight)


def _weighted(taps: Iterable[Array], weight: Array) -> Array:
    """Taps [B, T, ...channels] times their weights [...channels], added in order in float32."""
    pairs = zip(taps, weight, strict=True)
    terms = (tap.astype(jnp.float32) * each.astype(jnp.float32) for tap, each in pairs)
    return functools.reduce(jnp.add, terms)


def run_taps(before: Array, tokens: Array, dilation: int = 1) -> Array:
    """Each of consecutive tokens with the K - 1 before it, the oldest first: [B, T, K,
    ...channels].

    Args:
      before: [B, K - 1, ...channels], the last tokens before them.
      tokens: [B, T, ...channels].
      dilation: only those that are a multiple of it before a token; there are as many times the
        ``before``.
    """
    size, past = tokens.shape[1], before.shape[1]
    every = jnp.concatenate([before, tokens.astype(before.dtype)], axis=1)
    return jnp.stack([every[:, i : i + size] for i in range(0, past + 1, dilation)], axis=2)


def run_convolution(before: Array, tokens: Array, weight: Array) -> Array:
    """``convolution`` of consecutive tokens [B, T, ...channels] after ``before`` [B, K - 1,
    ...channels].

    Of many tokens neither each one's taps nor a copy of all behind ``before`` is made: they would
    take longer than the convolution. The first K - 1 tokens have one of their own.
    """
    past, size = before.shape[1], tokens.shape[1]
    tokens = tokens.astype(before.dtype)
    if size <= past:
        return _convolved(jnp.concatenate([before, tokens], axis=1), weight)
    first = _convolved(jnp.concatenate([before, tokens[:, :past]], axis=1), weight)
    no_tokens = [(0, 0)] * (tokens.ndim - 2)
    every = jnp.pad(tokens, [(0, 0), (past, 0), *no_tokens])
    first = jnp.pad(first, [(0, 0), (0, size - past), *no_tokens])
    is_first = (jnp.arange(size) < past).reshape(size, *(1,) * (tokens.ndim - 2))
    return jnp.where(is_first, first, _convolved(every, weight))


def _convolved(every: Array, weight: Array) -> Array:
    """The convolution of all but the first K - 1 of [B, T + K - 1, ...channels]."""
    size = every.shape[1] - len(weight) + 1
    return _weighted((every[:, place : place + size] for place in range(len(weight))), weight)


def tree_taps(
    before: Array, nodes: Array, ancestors: Array, depth: Array, dilation: int = 1
) -> Array:
    """Each node with its K - 1 ancestors, the oldest first: [B, N, K, ...channels].

    before: [B, K - 1, ...channels], the last tokens before the tree. nodes: [B, N, ...channels].
    ancestors, depth: see tree_places. dilation: as of run_taps.
    """
    past = before.shape[1]
    every = jnp.concatenate([before, nodes.astype(before.dtype)], axis=1)
    itself = jnp.broadcast_to(past + jnp.arange(nodes.shape[1]), depth.shape)[..., None]
    places = jnp.concatenate([tree_places(ancestors, depth, past), itself], axis=-1)
    places = places[..., ::dilation]
    taken = take_tokens(every, places.reshape(len(nodes), -1))
    return taken.reshape(*places.shape, *nodes.shape[2:])


def tree_places(ancestors: Array, depth: Array, past: int) -> Array:
    """Where the ``past`` tokens before each node are, the oldest first: int32 [B, N, past].

    Below ``past`` one of the last tokens before the tree, the oldest first, else ``past`` more than
    a node. ancestors: bool [B, N, N], whether node j is node i or one of its ancestors. depth:
    int32 [B, N], of a root 0.
    """
    places = []
    for distance in range(past, 0, -1):
        wanted = depth - distance  # the depth of that ancestor; below 0: before the tree
        found = jnp.argmax(ancestors & (depth[:, None, :] == wanted[..., None]), axis=-1)
        places.append(jnp.where(wanted >= 0, past + found, past + wanted))
    return jnp.stack(places, axis=-1).astype(jnp.int32)


def last_inputs(before: Array, tokens: Array, counts: Array) -> Array:
    """The last K - 1 inputs after the first ``counts`` [B] of tokens [B, T, ...channels], which
    follow ``before`` [B, K - 1, ...channels]."""
    past = before.shape[1]
    place = counts[:, None] + jnp.arange(past)
    new = take_tokens(tokens, jnp.clip(place - past, 0, tokens.shape[1] - 1))
    old = take_tokens(before, jnp.minimum(place, past - 1))
    return select_tokens(place < past, old, new.astype(before.dtype))


@pytree
class ConvolutionState(Pytree):
    """The LayerState of a convolution of C channels, for R rows.

    Attributes:
      inputs: of the last K - 1 tokens, float32; zeros before a row's first token.
      nodes: inputs of a verified tree that is not committed yet.
    """

    inputs: Array = array("batch", "length", "channels")  # [R, K - 1, C]
    nodes: Array | None = array("batch", "nodes", "channels", default=None)  # [B, N, C]

    @classmethod
    def create(cls, geometry: Geometry, channels: int, taps: int, layout: Layout) -> Self:
        """Rows without tokens; ``taps``: K, the width of the convolution."""
        size = geometry.num_rows, taps - 1, channels
        shape: Any = jax.ShapeDtypeStruct(size, jnp.dtype(jnp.float32))
        return zeros_like_shapes(cls(inputs=shape), geometry, layout)

    @property
    def overwritable(self) -> bool:
        return False

    def read_run(
        self, rows: Array, counts: Array, tokens: Array, weight: Array
    ) -> tuple[Array, Self]:
        """The convolution, float32 [B, T, C], of consecutive tokens [B, T, C] of rows [B], and the
        state after the first ``counts`` [B] of them. The other tokens are padding.

        weight: [K, C].
        """
        convolved = run_convolution(self.inputs[rows], tokens, weight)
        return convolved, self._appended(rows, counts, tokens)

    def read_tree(
        self, rows: Array, nodes: Array, weight: Array, ancestors: Array, depth: Array
    ) -> tuple[Array, Self]:
        """The convolution, float32 [B, N, C], of a tree's nodes [B, N, C], and the state that waits
        for the commit. See tree_taps for the arguments; weight: [K, C]."""
        taps = tree_taps(self.inputs[rows], nodes, ancestors, depth)
        return convolution(taps, weight), self.replace(nodes=nodes)

    # Operations of a LayerState.

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Append the inputs of accepted nodes."""
        return [state._committed(committed) for state in states]

    def _committed(self, committed: CommittedPath) -> Self:
        assert self.nodes is not None, "a commit follows the verification of a tree"
        path = take_tokens(self.nodes, committed.path)
        return self.replace(nodes=None)._appended(committed.rows, committed.counts, path)

    def _appended(self, rows: Array, counts: Array, tokens: Array) -> Self:
        last = last_inputs(self.inputs[rows], tokens, counts)
        target = jnp.where(counts > 0, rows, self.inputs.shape[0])  # out of range: unchanged
        return self.replace(inputs=self.inputs.at[target].set(last, mode="drop"))

    def reset(self, rows: Array) -> Self:
        return self.replace(inputs=self.inputs.at[rows].set(0, mode="drop"))

    def take(self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x: x[rows], self)

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x, rows_saved: x.at[rows].set(rows_saved), self, saved)
