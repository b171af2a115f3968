"""What mixers share that keep a state of each row and nothing in pages."""

from typing import Any, NamedTuple, Protocol, Self

import jax.numpy as jnp
from jax import Array, lax

from jaxspec.cache import Geometry
from jaxspec.cache.recurrent import DeltaNodes, DeltaState
from jaxspec.models.attention import PagedAttend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.parallel import Layout
from pallas_kernels.selection import Kernels


def check_whole_sequences(layout: Layout) -> None:
    """Raises ValueError for devices that share sequences."""
    if layout.sequence or layout.tokens:
        raise ValueError("recurrent layers need whole sequences on a device: take sp 1")


class Convolved(Protocol):
    """A mixer that reads its channels through a causal convolution."""

    @property
    def taps(self) -> Array:
        """Weights [K, G, c], the token's own last."""
        ...

    def init_state(self, geometry: Geometry, layout: Layout) -> DeltaState:
        """Rows without tokens."""
        ...


class RowsOfPass(NamedTuple):
    """A pass of T consecutive tokens, or of a tree's nodes, over the states of B rows.

    Attributes:
      rows: [B] index of each in the states.
      lens: [B] committed tokens.
      counts: [B] number of the T tokens that are not padding.
      ancestors: bool [B, N, N], whether node j is node i or one of its ancestors; None: a run.
      depth: [B, N], of a root 0.
    """

    rows: Array
    lens: Array
    counts: Array
    ancestors: Array | None = None
    depth: Array | None = None

    @classmethod
    def of(cls, attend: Any, size: int) -> Self:
        """The rows of a paged pass with so many tokens or nodes."""
        assert isinstance(attend, PagedAttend), "states belong to paged passes"
        lens = attend.context_lens
        run = cls(attend.rows, lens, attend.kv_lens - lens)
        if attend.ancestors is None:
            return run
        bits = (attend.ancestors[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        mask = bits.reshape(*attend.ancestors.shape[:-1], -1)[..., :size] == 1
        return run._replace(ancestors=mask, depth=attend.positions - lens[:, None])

    @classmethod
    def whole(cls, batch: int, size: int) -> Self:
        """Rows that begin in a pass without states."""
        return cls(jnp.arange(batch), jnp.zeros(batch, int), jnp.full(batch, size))

    @property
    def tree(self) -> tuple[Array, Array] | None:
        """Ancestors and depths of a tree's nodes; None: a run."""
        if self.ancestors is None or self.depth is None:
            return None
        return self.ancestors, self.depth

    def convolved(self, state: DeltaState, channels: Array, weight: Array) -> Array:
        """See DeltaState.convolved."""
        return state.convolved(self.rows, channels, weight, self.ancestors, self.depth)

    def read(
        self, state: DeltaState | None, q: Array, new: DeltaNodes, kernels: Kernels
    ) -> tuple[Array, DeltaState | None]:
        """Outputs [B, T, G, r, Dv] of the tokens, and the new state: see DeltaState.read_run, or of
        a tree read_tree. Without a state the tokens are whole sequences, of which nothing is
        kept."""
        if state is None:
            return new.inputs.sequences(q), None
        if self.tree is not None:
            return state.read_tree(self.rows, self.lens, q, new, *self.tree, kernels)
        return after_state(state.read_run(self.rows, self.lens, self.counts, q, new, kernels))


def after_state[Read: tuple[Array, Any]](read: Read) -> Read:
    """Outputs of consecutive tokens and the new state, of which nothing that follows reads the
    outputs before the state is there. XLA would compute the new states of all layers at the end of
    a prompt's pass, and keep the inputs of all tokens of each layer until then."""
    return lax.optimization_barrier(read)


def rows_of_pass(
    mixer: Convolved, size: tuple[int, int], state: DeltaState | None, step: ForwardPass
) -> tuple[RowsOfPass, DeltaState]:
    """The rows of a pass of ``size`` B, T, and their states. Without a state all rows begin in
    this pass."""
    if state is None:
        batch, length = size
        return RowsOfPass.whole(batch, length), mixer.init_state(Geometry(0, 0, batch), step.layout)
    return RowsOfPass.of(step.attend, size[1]), state


def convolved(
    mixer: Convolved, channels: Array, state: DeltaState | None, step: ForwardPass
) -> tuple[RowsOfPass, Array]:
    """The rows of a pass, and its channels [B, T, G, c] after the convolution."""
    batch, size = channels.shape[:2]
    where, before = rows_of_pass(mixer, (batch, size), state, step)
    return where, where.convolved(before, channels, mixer.taps)
