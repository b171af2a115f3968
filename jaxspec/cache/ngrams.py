"""The state of embeddings of n-grams: of each row the last tokens, and the last inputs of a
convolution.

Of a tree's node these are its ancestors, then committed tokens. Nothing is rolled back: a commit
appends what the accepted path has.
"""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache.convolution import last_inputs, run_taps, tree_taps
from jaxspec.cache.layer_state import CommittedPath, Geometry, zeros_like_shapes
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.delta_rule.tokens import take_tokens
from pallas_kernels.selection import Kernels

Tree = tuple[Array, Array]  # ancestors and depths, see convolution.tree_places


@pytree
class NgramNodes(Pytree):
    """A tree's tokens, between its verification and its commit."""

    tokens: Array = array("batch", "nodes")  # [B, W]
    inputs: Array = array("batch", "nodes", "group", "hidden")  # [B, W, N, H]


@pytree
class NgramState(Pytree):
    """The LayerState of embeddings of n-grams, for R rows with N streams.

    Attributes:
      tokens: int32, ids of the last tokens, each plus 1; 0 before a row's first token.
      inputs: of the convolution, of the last tokens; zeros before a row's first token.
      nodes: of a verified tree that is not committed yet.
    """

    tokens: Array = array("batch", "past")  # [R, n - 1]
    inputs: Array = array("batch", "length", "group", "hidden")  # [R, past, N, H]
    nodes: NgramNodes | None = None

    @classmethod
    def create(
        cls, geometry: Geometry, sizes: tuple[int, int, int, int], dtype: jnp.dtype, layout: Layout
    ) -> Self:
        """Rows without tokens; ``sizes``: tokens and inputs that are kept, N, H."""
        tokens, past, count, hidden = sizes
        struct: Any = jax.ShapeDtypeStruct
        shapes = cls(
            tokens=struct((geometry.num_rows, tokens), jnp.dtype(jnp.int32)),
            inputs=struct((geometry.num_rows, past, count, hidden), dtype),
        )
        return zeros_like_shapes(shapes, geometry, layout)

    @property
    def overwritable(self) -> bool:
        return False

    def texts(self, rows: Array, tokens: Array, tree: Tree | None) -> Array:
        """Tokens [B, T] of rows [B], each plus 1, with those before them: int32 [B, T, n]."""
        return _taps(self.tokens[rows], tokens + 1, tree, 1)

    def taps(self, rows: Array, inputs: Array, tree: Tree | None, dilation: int) -> Array:
        """Inputs [B, T, N, H] of tokens, and of every ``dilation``-th token before them: [B, T, K,
        N, H]."""
        return _taps(self.inputs[rows], inputs, tree, dilation)

    def after(self, rows: Array, counts: Array, tokens: Array, inputs: Array) -> Self:
        """The state after the first ``counts`` [B] of consecutive tokens [B, T]."""
        target = jnp.where(counts > 0, rows, self.tokens.shape[0])  # out of range: unchanged
        last_tokens = last_inputs(self.tokens[rows], tokens + 1, counts)
        last = last_inputs(self.inputs[rows], inputs, counts)
        return self.replace(
            tokens=self.tokens.at[target].set(last_tokens, mode="drop"),
            inputs=self.inputs.at[target].set(last, mode="drop"),
        )

    def waiting(self, tokens: Array, inputs: Array) -> Self:
        """The state that waits for the commit of a tree's nodes [B, W]."""
        return self.replace(nodes=NgramNodes(tokens=tokens, inputs=inputs))

    # Operations of a LayerState.

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Append what accepted nodes have."""
        return [state._committed(committed) for state in states]

    def _committed(self, committed: CommittedPath) -> Self:
        assert self.nodes is not None, "a commit follows the verification of a tree"
        tokens, inputs = (
            take_tokens(x, committed.path) for x in (self.nodes.tokens, self.nodes.inputs)
        )
        return self.replace(nodes=None).after(committed.rows, committed.counts, tokens, inputs)

    def reset(self, rows: Array) -> Self:
        return jax.tree.map(lambda x: x.at[rows].set(0, mode="drop"), self)

    def take(self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x: x[rows], self)

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x, rows_saved: x.at[rows].set(rows_saved), self, saved)


def _taps(before: Array, new: Array, tree: Tree | None, dilation: int) -> Array:
    if tree is None:
        return run_taps(before, new, dilation)
    return tree_taps(before, new, *tree, dilation)
