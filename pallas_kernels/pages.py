"""Arguments that kernels over pages share, grouped in pytrees."""

import dataclasses
from typing import NamedTuple

from jax import Array


class LayerPages(NamedTuple):
    """The pages of one layer.

    Attributes:
      k, v: [P, G, K, D], keys and values.
      k_scale, v_scale: float32 [G], for pages of bytes (see float8.py): the bytes' numbers times
        the scale are the keys and values; else None.
    """

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None


class QueryContext(NamedTuple):
    """The slots of each sequence, and which of them each of its T queries sees.

    Attributes:
      page_table: [B, M] int32, the pages of each sequence, in order.
      context_lens: [B] int32, committed slots of each sequence.
      positions: [B, T] int32, the position of each query counted in slots; only used by windows.
      ancestors: [B, T, words] uint32 bit mask over the slots past the context. None: causal.
      kv_lens: [B] int32, end of each sequence's slots. No query of sequence ``b`` sees a slot from
        ``kv_lens[b]`` on, whatever the mask says. None: see ``ends``.
    """

    page_table: Array
    context_lens: Array
    positions: Array
    ancestors: Array | None = None
    kv_lens: Array | None = None

    @property
    def ends(self) -> Array:
        """``kv_lens``, by default ``context_lens`` plus T for causal queries, or plus the number of
        mask bits."""
        if self.kv_lens is not None:
            return self.kv_lens
        if self.ancestors is None:
            return self.context_lens + self.positions.shape[1]
        return self.context_lens + 32 * self.ancestors.shape[2]

    def check(self, batch: int, num_tokens: int) -> None:
        """Raises ValueError if these are not the slots of so many sequences and queries."""
        table, lens, positions, ancestors, _ = self
        if table.shape[0] != batch or not lens.shape == self.ends.shape == (batch,):
            raise ValueError(
                f"page table {table.shape}, context lengths {lens.shape} and kv_lens "
                f"{self.ends.shape} do not fit a batch of {batch}"
            )
        if positions.shape != (batch, num_tokens):
            raise ValueError(f"positions must be {(batch, num_tokens)}, got {positions.shape}")
        if ancestors is not None and ancestors.shape[:2] != (batch, num_tokens):
            raise ValueError(f"ancestors must start with {(batch, num_tokens)}: {ancestors.shape}")


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What shapes a program of attention: hashable, a static argument.

    Attributes:
      window: attend only to the latest ``window`` positions, the query's own included. Tree slots
        are always visible under the mask: the caller must keep trees shallower than the window.
      scale: of the scores; None: 1 / sqrt(D).
      softcap: scores x, scaled, become ``softcap * tanh(x / softcap)``; None: they stay.
      first_slot: slots before it are hidden.
      chunk: attend only to positions of the query's own span of so many, which begins at a multiple
        of it; None: spans do not matter. Nodes of a tree have the positions of their depths.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    first_slot: int = 0
    chunk: int | None = None
