"""The few largest entries of a row, and the sum that makes log-probabilities of them."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.selection import Implementation, kernel_module
from pallas_kernels.top_k.reference import top_k_reference

MOST_ENTRIES = 65536  # of a row: eight blocks hold them in registers
MOST_TAKEN = 16  # by each of up to eight blocks, whose candidates a warpgroup merges


@jax.named_scope("top_k")
def top_k(
    x: Array, k: int, implementation: Implementation = "reference"
) -> tuple[Array, Array, Array]:
    """The k largest, largest first, the first of equals first; and log(sum(exp(x))).

    Args:
      x: float32 [..., n]. What NaN and +inf do to values and sum is not said; indices stay in
        range. Zeros of both signs may or may not count as equal.
      implementation: "auto" takes the Hopper kernel where it fits (rows of 128 to
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
    if k > MOST_TAKEN:
        return f"k = {k}: it takes {MOST_TAKEN} at most"
    return None
