"""What mixers share that keep a state of each row and nothing in pages."""

import jax.numpy as jnp
from jax import Array

from jaxspec.models.attention import PagedAttend
from jaxspec.parallel import Layout


def check_whole_sequences(layout: Layout) -> None:
    """Raises ValueError for devices that share sequences."""
    if layout.sequence or layout.tokens:
        raise ValueError("recurrent layers need whole sequences on a device: take sp 1")


def tree_of(where: PagedAttend, size: int) -> tuple[Array | None, Array | None]:
    """The ancestors, bool [B, N, N], and depths [B, N] of a tree's nodes; None for a run."""
    if where.ancestors is None:
        return None, None
    bits = (where.ancestors[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    mask = bits.reshape(*where.ancestors.shape[:-1], -1)[..., :size] == 1
    return mask, where.positions - where.context_lens[:, None]
