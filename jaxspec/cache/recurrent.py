"""The state of a recurrent layer with a delta rule, or of Mamba-2, an entry per row.

Kept are a checkpoint of the recurrence and the inputs of the tokens after it. A tree is verified
from both in one pass (DeltaInputs.tree), and its inputs wait for the commit, which appends those of
the accepted path. Nothing is rolled back, and no state per node exists.

The checkpoint is always that after a multiple of C tokens, the capacity of the window. Every C
tokens are folded into it in order, by the same code (``fold`` and ``chunk`` share it), whether
they were read from a prompt, decoded one by one, or accepted from trees. So equal inputs give equal
bits of the state, however chunks and rounds cut the sequence. (The kernels of rounds apply one
token after the other, that of prompts blocks of 16, and how calls cut a prompt changes no bit. What
prompts leave and what rounds leave agree up to rounding.)
Inputs themselves come from products, which round alike only in passes of one shape, as keys and
values of attention do: see SpeculationConfig.verify_width. Without it the state is the same up to
rounding.

A row's number of tokens is its ``context_lens``, as in attention; nothing is counted here.
"""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache.convolution import convolution, last_inputs, run_convolution, tree_taps
from jaxspec.cache.delta_rule import DeltaInputs
from jaxspec.cache.layer_state import CommittedPath, Geometry, zeros_like_shapes
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.delta_rule import (
    LayerRows,
    RowStates,
    delta_commit,
    delta_read,
    delta_run,
    misfit,
    run_misfit,
)
from pallas_kernels.delta_rule.tokens import select_tokens, take_tokens
from pallas_kernels.selection import NO_KERNELS, Implementation, Kernels


@pytree
class DeltaNodes(Pytree):
    """A tree's inputs, between its verification and its commit."""

    inputs: DeltaInputs  # [B, N, ...]
    # [B, N, G, c or more]; what is after the channels is not read.
    channels: Array = array("batch", "nodes", "kv_heads", "group")


@pytree
class DeltaState(Pytree):
    """The LayerState of a recurrence: R rows, G key heads with r value heads each. All tokens do
    the same kind of thing to the state: DeltaInputs, or those of state_space and channel_decay.

    Attributes:
      s: the state after the last multiple of C tokens, float32.
      window: inputs of the tokens since, float32 [R, C, ...]; entries past the row's are noise.
      channels: inputs of the convolution, of the last K - 1 tokens: [R, K - 1, G, c].
      nodes: of a verified tree that is not committed yet.
    """

    s: Array = array("batch", "kv_heads", "group", "head_dim", "head_dim")  # [R, G, r, Dv, Dk]
    window: DeltaInputs
    channels: Array = array("batch", "length", "kv_heads", "group")
    nodes: DeltaNodes | None = None
    folded: int = static()  # C

    @classmethod
    def create(
        cls,
        geometry: Geometry,
        heads: tuple[int, int, int, int],
        taps: int,
        folded: int,
        dtype: jnp.dtype,
        layout: Layout,
        kind: type[DeltaInputs] = DeltaInputs,
    ) -> Self:
        """Rows without tokens.

        Args:
          heads: G, r, Dk, Dv.
          taps: K, the width of the convolution.
          folded: C, the tokens that are folded into the state at once.
          dtype: of the convolution's inputs.
          kind: what tokens do to the state.
        """
        groups, values, k_dim, v_dim = heads
        rows, wide = geometry.num_rows, jnp.dtype(jnp.float32)
        struct: Any = jax.ShapeDtypeStruct
        shapes = cls(
            s=struct((rows, groups, values, v_dim, k_dim), wide),
            window=kind.shapes(rows, folded, heads),
            channels=struct((rows, taps - 1, groups, 2 * k_dim + values * v_dim), dtype),
            folded=folded,
        )
        return zeros_like_shapes(shapes, geometry, layout)

    @property
    def overwritable(self) -> bool:
        return False

    # Reading.

    def convolved(
        self,
        rows: Array,
        channels: Array,
        weight: Array,
        ancestors: Array | None,
        depth: Array | None,
    ) -> Array:
        """The causal convolution of a pass's channels [B, T, G, c]: float32, of the same shape.

        weight: [K, G, c]. ancestors, depth: of a tree's nodes (see tree_taps), or None.
        """
        before = self.channels[rows]
        if ancestors is None or depth is None:
            return run_convolution(before, channels, weight)
        return convolution(tree_taps(before, channels, ancestors, depth), weight)

    def read_tree(
        self,
        rows: Array,
        lens: Array,
        q: Array,
        nodes: DeltaNodes,
        ancestors: Array,
        depth: Array,
        kernels: Kernels = NO_KERNELS,
    ) -> tuple[Array, Self]:
        """Outputs [B, N, G, r, Dv] of a tree's nodes after ``lens`` [B] tokens, and the state that
        waits for the commit. See delta_rule.tree for the arguments."""
        held, after = lens % self.folded, self.replace(nodes=nodes)
        if self._has_kernel("delta_rule", kernels, q.shape[1]):
            states, inputs = self._row_states(rows, held), nodes.inputs.tokens
            return delta_read(states, q, inputs, ancestors, depth, "mosaic_gpu"), after
        window = self._window(rows, held)
        return window.tree(self.s[rows], q, nodes.inputs, ancestors, depth), after

    def _has_kernel(self, operation: str, kernels: Kernels, num_nodes: int = 1) -> bool:
        fits = misfit(self.s, num_nodes) is None
        return self.window.has_kernels and fits and operation in kernels

    def read_run(
        self,
        rows: Array,
        lens: Array,
        counts: Array,
        q: Array,
        new: DeltaNodes,
        kernels: Kernels = NO_KERNELS,
    ) -> tuple[Array, Self]:
        """Outputs [B, T, G, r, Dv] of the consecutive tokens after ``lens`` [B], and the state
        after the first ``counts`` [B] of them. The other tokens are padding."""
        held = lens % self.folded
        if self._has_kernel("delta_run", kernels) and not run_misfit(self._row_states(rows, held)):
            return self.read_by_delta_run(rows, held, counts, q, new, "mosaic_gpu")
        inputs, total = self._aligned(rows, held, new.inputs, counts), held + counts
        num_chunks = inputs.k.shape[1] // self.folded
        place = jnp.arange(num_chunks * self.folded) - held[:, None]
        queries = take_tokens(q, jnp.clip(place, 0, q.shape[1] - 1))
        queries = select_tokens((place >= 0) & (place < counts[:, None]), queries, 0)

        def step(s: Array, part: tuple[Array, Array, DeltaInputs]) -> tuple[Array, Array]:
            index, queries, inputs = part
            out, after = inputs.chunk(s, queries)
            return _rows((index + 1) * self.folded <= total, after, s), out

        parts = jnp.arange(num_chunks), *jax.tree.map(self._split, (queries, inputs))
        s, out = lax.scan(step, self.s[rows], parts)
        out = jnp.moveaxis(out, 0, 1).reshape(len(rows), -1, *out.shape[3:])
        out = take_tokens(out, held[:, None] + jnp.arange(q.shape[1]))
        target = self._kept_rows(rows, counts)
        state = self.replace(s=self.s.at[target].set(s, mode="drop"))
        return out, state._appended(rows, counts, inputs, total, new.channels)

    def read_by_delta_run(
        self,
        rows: Array,
        held: Array,
        counts: Array,
        q: Array,
        new: DeltaNodes,
        implementation: Implementation,
    ) -> tuple[Array, Self]:
        """``read_run`` by ``pallas_kernels.delta_rule.delta_run``; ``held``: [B] tokens in the
        windows."""
        inputs, total = new.inputs, held + counts
        states = self._row_states(rows, held)
        out, s = delta_run(states, counts, q, inputs.tokens, implementation)
        # Of the tokens since the last multiple of C, those from ``held`` on are new.
        place = (total // self.folded * self.folded)[:, None] + jnp.arange(self.folded)
        index = jnp.clip(place - held[:, None], 0, q.shape[1] - 1)

        def last(old: Array, new: Array) -> Array:
            return select_tokens(place >= held[:, None], take_tokens(new, index), old[rows])

        window = jax.tree.map(last, self.window, inputs)
        return out, self.replace(s=s)._with_last(rows, counts, window, new.channels)

    # Operations of a LayerState.

    @classmethod
    @jax.named_scope("compact")
    def commit(
        cls, states: Sequence[Self], committed: CommittedPath, kernels: Kernels
    ) -> Sequence[Self]:
        """Append the inputs of accepted nodes, and fold windows that are full."""
        nodes = states[0].nodes
        assert nodes is not None, "a commit follows the verification of a tree"
        if states[0]._has_kernel("delta_rule", kernels, nodes.channels.shape[1]):
            return _committed_by_kernel(states, committed)
        return [state._committed(committed) for state in states]

    def _committed(self, committed: CommittedPath) -> Self:
        rows, counts = committed.rows, committed.counts
        held = committed.context_lens % self.folded
        assert self.nodes is not None
        nodes = jax.tree.map(lambda x: take_tokens(x, committed.path), self.nodes)
        inputs, total = self._aligned(rows, held, nodes.inputs, counts), held + counts
        target = self._kept_rows(rows, counts)

        def folded(whole: Array) -> Array:
            s = whole[rows]
            for index in range(inputs.k.shape[1] // self.folded):
                first = index * self.folded
                part = jax.tree.map(lambda x, at=first: x[:, at : at + self.folded], inputs)
                s = _rows(first + self.folded <= total, part.fold(s), s)
            return whole.at[target].set(s, mode="drop")

        full = jnp.any((total >= self.folded) & (counts > 0))
        state = self.replace(s=lax.cond(full, folded, lambda whole: whole, self.s), nodes=None)
        return state._appended(rows, counts, inputs, total, nodes.channels)

    def reset(self, rows: Array) -> Self:
        """Zeros in the rows. Windows stay: entries past a row's tokens are never used."""
        return self.replace(
            s=self.s.at[rows].set(0, mode="drop"),
            channels=self.channels.at[rows].set(0, mode="drop"),
        )

    def take(self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x: x[rows], self)

    def put(self, saved: Self, pages: Array, rows: Array) -> Self:
        return jax.tree.map(lambda x, rows_saved: x.at[rows].set(rows_saved), self, saved)

    # Parts of the above.

    def _row_states(self, rows: Array, held: Array) -> RowStates:
        return RowStates(self.s, self.window.tokens, rows, held)

    def _layer_rows(self) -> LayerRows:
        assert self.nodes is not None
        inputs, channels = self.nodes.inputs.tokens, self.nodes.channels
        channels = channels.astype(self.channels.dtype)
        return LayerRows(self.s, self.window.tokens, self.channels, inputs, channels)

    def _window(self, rows: Array, held: Array) -> DeltaInputs:
        """The first ``held`` [B] entries of the rows' windows; the others change nothing."""
        window = jax.tree.map(lambda x: x[rows], self.window)
        return window.where(jnp.arange(self.folded) < held[:, None])

    def _aligned(self, rows: Array, held: Array, new: DeltaInputs, counts: Array) -> DeltaInputs:
        """The windows of the rows with ``counts`` [B] inputs of new [B, T, ...] after them, padded
        to a multiple of C, with invalid tokens selected away."""
        width, size = self.folded, new.k.shape[1]
        length = -(-(width - 1 + size) // width) * width
        place = jnp.arange(length)
        source = jnp.where(
            place < held[:, None],
            jnp.minimum(place, width - 1),
            width + jnp.clip(place - held[:, None], 0, size - 1),
        )
        both = jax.tree.map(lambda x, y: jnp.concatenate([x[rows], y], axis=1), self.window, new)
        chosen = jax.tree.map(lambda x: take_tokens(x, source), both)
        return chosen.where(place < (held + counts)[:, None])

    def _appended(
        self, rows: Array, counts: Array, aligned: DeltaInputs, total: Array, channels: Array
    ) -> Self:
        """With the windows that ``total`` [B] of the aligned inputs leave, and the last of the new
        channels [B, T, G, c]."""
        length = aligned.k.shape[1]
        place = (total // self.folded * self.folded)[:, None] + jnp.arange(self.folded)
        window = jax.tree.map(lambda x: take_tokens(x, jnp.minimum(place, length - 1)), aligned)
        return self._with_last(rows, counts, window, channels)

    def _with_last(self, rows: Array, counts: Array, window: DeltaInputs, channels: Array) -> Self:
        """With these windows [B, C, ...], and the last of the new channels [B, T, G, c or more]."""
        target, channels = self._kept_rows(rows, counts), channels[..., : self.channels.shape[-1]]
        last = last_inputs(self.channels[rows], channels, counts)
        return self.replace(
            window=jax.tree.map(
                lambda x, new_rows: x.at[target].set(new_rows, mode="drop"), self.window, window
            ),
            channels=self.channels.at[target].set(last, mode="drop"),
        )

    def _kept_rows(self, rows: Array, counts: Array) -> Array:
        """The rows that change; the others out of range."""
        return jnp.where(counts > 0, rows, self.s.shape[0])

    def _split(self, x: Array) -> Array:
        """[B, m * C, ...] -> [m, B, C, ...]"""
        parts = x.reshape(x.shape[0], -1, self.folded, *x.shape[2:])
        return jnp.moveaxis(parts, 1, 0)


def _committed_by_kernel[State: DeltaState](
    states: Sequence[State], committed: CommittedPath
) -> list[State]:
    """The states of layers after a commit: a launch has several."""
    held = committed.context_lens % states[0].folded
    of_rows = committed.rows, held, committed.path, committed.counts
    kept = delta_commit([state._layer_rows() for state in states], *of_rows, "mosaic_gpu")
    return [
        state.replace(s=s, window=DeltaInputs(**window._asdict()), channels=channels, nodes=None)
        for state, (s, window, channels) in zip(states, kept, strict=True)
    ]


def _rows(chosen: Array, x: Array, other: Array) -> Array:
    """x [B, ...] where chosen [B], else other."""
    return jnp.where(chosen.reshape(-1, *(1,) * (x.ndim - 1)), x, other)
