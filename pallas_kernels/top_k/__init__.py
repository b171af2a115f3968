"""The k largest entries of a row and the row's log-sum-exp, which gives their log-probabilities."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.selection import Implementation, kernel_module
from pallas_kernels.top_k.reference import top_k_reference

MAX_ENTRIES = 65536  # in a row: eight blocks hold them in registers
MAX_TAKEN = 16  # so that the candidates of eight blocks fit one warpgroup: 8 x 16 = 128 threads


@jax.named_scope("top_k")
def top_k(
    x: Array, k: int, implementation: Implementation = "reference"
) -> tuple[Array, Array, Array]:
    """The k largest entries, and log(sum(exp(x))).

    Entries are in descending order; equal entries are in order of their indices.

    Args:
      x: float32 [..., n]. With NaN or +inf, values and sum are unspecified; indices stay in range.
        0.0 and -0.0 may or may not count as equal.
      implementation: see selection.Implementation; the Hopper kernel takes rows of 128 to 65,536
        entries, a multiple of 128; k up to 16.

    Returns values [..., k], their indices int32 [..., k], and the log-sum-exp [...].
    """
    mosaic = kernel_module("top_k", implementation, misfit(x, k))
    return top_k_reference(x, k) if mosaic is None else mosaic.top_k_mosaic(x, k=k)


def misfit(x: Array, k: int) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    size = x.shape[-1]
    if x.dtype != jnp.float32:
        return f"{x.dtype} entries: they must be float32"
    if size % 128 or not 128 <= size <= MAX_ENTRIES:
        return f"rows of {size}: they must be a multiple of 128, of at most {MAX_ENTRIES} entries"
    if k > MAX_TAKEN:
        return f"k = {k}: it takes {MAX_TAKEN} at most"
    return None
