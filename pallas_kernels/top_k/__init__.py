"""The few largest entries of a row, and the sum that makes log-probabilities of them."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.top_k.reference import top_k_reference
from pallas_kernels.tuning import Implementation, kernel_module, top_k_shares

MOST_ENTRIES = 65536  # of a row: eight blocks hold them in registers
MOST_CANDIDATES = 128  # of all blocks of a row together


@jax.named_scope("top_k")
def top_k(x: Array, k: int, implementation: Implementation = "auto") -> tuple[Array, Array, Array]:
    """The k largest, largest first, the first of equals first; and log(sum(exp(x))).

    Args:
      x: float32 [..., n]. What a NaN does to the values is not said; indices stay in range.
      implementation: "auto" takes the Hopper kernel where it was measured and fits (rows of 128 to
        65,536 entries, a multiple of 128; k up to 16), else the reference.

    Returns values [..., k], their indices int32 [..., k], and the sum's logarithm [...].

    Raises ValueError for arguments that the kernel cannot take when it is named.
    """
    mosaic = kernel_module("top_k", implementation, misfit(x, k))
    return top_k_reference(x, k) if mosaic is None else mosaic.top_k_mosaic(x, k=k)


def misfit(x: Array, k: int) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    size = x.shape[-1]
    if x.dtype != jnp.float32:
        return f"{x.dtype} entries: they must be float32"
    if size % 128 or not 128 <= size <= MOST_ENTRIES:
        return f"rows of {size}: they must be a multiple of 128, of at most {MOST_ENTRIES} entries"
    if k * top_k_shares(size) > MOST_CANDIDATES:
        return f"k = {k} of {size}: blocks may have {MOST_CANDIDATES} candidates together"
    return None
