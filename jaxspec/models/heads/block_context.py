"""What the tokens of a block see, and the tokens of the context that its head reads: alone, or in
the pass over its next block.

Of a context token layers make nothing but keys and values, from the same fused states in every
layer, by the product that makes those of the block's tokens. One product of both reads its weights
once.
"""

import dataclasses
import math
from typing import Literal

from jax import Array

from jaxspec.cache import PagedKV
from jaxspec.models.attention import PagedAttend, write_heads
from jaxspec.models.attention_heads import Heads
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.add_rms_norm.reference import followed_by

# The layers in which a token of a block sees of the block only itself and those before it: none,
# those with a window, or all.
Causality = Literal["none", "windows", "all"]


def is_causal(causal: Causality, window: int | None) -> bool:
    """Whether a layer with this window, or without one, is causal inside of a block."""
    return causal == "all" or (causal == "windows" and window is not None)


@pytree
class BlockAttend(Pytree):
    """The Attend function of blocks, whose layers see them in one direction or in both.

    A window goes along with the token, in the block too. Paged attention needs no mask for either
    direction: where all of a block is seen, its slots count as context.

    ``paged``: of a block's tokens, one after the other, after their context.
    """

    paged: PagedAttend
    causal: Causality = static()

    @property
    def slots(self) -> Array:
        return self.paged.slots

    @property
    def positions(self) -> Array:
        return self.paged.positions

    def __call__(self, state: PagedKV, heads: Heads, window: int | None) -> tuple[Array, PagedKV]:
        return self._of(window)(state, heads, window)

    def attended(self, queries: Array, state: PagedKV, heads: Heads, window: int | None) -> Array:
        """See PagedAttend.attended."""
        return self._of(window).attended(queries, state, heads, window)

    def _of(self, window: int | None) -> PagedAttend:
        if is_causal(self.causal, window):
            return self.paged
        return self.paged.replace(context_lens=self.paged.kv_lens)


@pytree
class WriteOnly(Pytree):
    """An Attend function that writes the keys and values of tokens to ``slots`` [B, T], and gives
    the queries in the place of what they would attend to."""

    slots: Array = array("batch", "length")

    def __call__(self, state: PagedKV, heads: Heads, window: int | None) -> tuple[Array, PagedKV]:
        return write_heads(state, heads, self.slots)


@pytree
class Context(Pytree):
    """Context tokens [B, S] whose keys and values a block's pass writes.

    ``fused``: see BlockHead.fused; ``positions`` are rotary ones; ``slots`` 0: not written.
    """

    fused: Array = array("batch", "length", "whole_hidden")  # [B, S, H]
    positions: Array = array("batch", "length")
    slots: Array = array("batch", "length")

    def beside(self, block: Array, context: Array) -> Array:
        """Arrays of the block's tokens [B, T, ...] and of the context's [B, S, ...] as those of a
        single sequence: [1, B * T + B * S, ...], the block's first."""
        return followed_by(block, context.reshape(1, -1, *context.shape[2:]))

    @property
    def rows(self) -> Array:
        """The fused states, as those of one sequence: [1, B * S, H]."""
        return self.fused.reshape(1, -1, self.fused.shape[-1])


@dataclasses.dataclass(frozen=True)
class AttendBeside:
    """The Attend function of a pass over a block's tokens and a context beside them: it writes the
    keys and values of all, and the block's tokens attend."""

    block: BlockAttend
    context: Context

    def __call__(self, state: PagedKV, heads: Heads, window: int | None) -> tuple[Array, PagedKV]:
        slots = self.block.slots
        queries, state = write_heads(state, heads, self.context.beside(slots, self.context.slots))
        block_queries = queries[0, : math.prod(slots.shape)].reshape(
            *slots.shape, *queries.shape[2:]
        )
        return self.block.attended(block_queries, state, heads, window), state
