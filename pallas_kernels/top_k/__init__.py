"""The k largest entries of a row and the row's log-sum-exp, which gives their log-probabilities."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.selection import Implementation, kernel_module
from pallas_kernels.top_k.reference import best_with, top_k_reference

MAX_ENTRIES = 65536  # in a row: eight blocks hold them in registers
MAX_PARTS = 8  # of a longer row
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
        entries, a multiple of 128, or of up to eight such parts of equal size (not by "auto"); k up
        to 16.

    Returns values [..., k], their indices int32 [..., k], and the log-sum-exp [...].
    """
    parts = _parts(x.shape[-1])
    # Rows in several parts were compiled for an H100, but have not run: only if they are asked for.
    chosen = "reference" if implementation == "auto" and parts != 1 else implementation
    mosaic = kernel_module("top_k", chosen, misfit(x, k))
    if mosaic is None or parts is None:
        return top_k_reference(x, k)
    if parts == 1:
        return mosaic.top_k_mosaic(x, k=k)
    found = mosaic.top_k_mosaic(x.reshape(*x.shape[:-1], parts, -1), k=k)
    return merged(found, x.shape[-1])


def merged(found: tuple[Array, Array, Array], size: int) -> tuple[Array, Array, Array]:
    """The results of rows of ``size`` entries, of those of their P equal parts: [..., P, k] twice,
    and [..., P]."""
    values, indices, log_sums = found
    *lead, parts, k = values.shape
    first = size // parts * jnp.arange(parts, dtype=jnp.int32)
    indices = (indices + first[:, None]).reshape(*lead, -1)
    values, indices = best_with(values.reshape(*lead, -1), k, [indices])
    # Part by part, so that this is no launch of its own.
    log_sum = functools.reduce(jnp.logaddexp, [log_sums[..., part] for part in range(parts)])
    return values, indices, log_sum


def _parts(size: int) -> int | None:
    """The fewest equal parts of a row that the kernel takes; None: there are none."""
    for parts in range(1, MAX_PARTS + 1):
        if size % (128 * parts) == 0 and 128 <= size // parts <= MAX_ENTRIES:
            return parts
    return None


def misfit(x: Array, k: int) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    size = x.shape[-1]
    if x.dtype != jnp.float32:
        return f"{x.dtype} entries: they must be float32"
    if _parts(size) is None:
        return (
            f"rows of {size}: they, or up to {MAX_PARTS} equal parts of them, must be a multiple "
            f"of 128, of at most {MAX_ENTRIES} entries"
        )
    if k > MAX_TAKEN:
        return f"k = {k}: it takes {MAX_TAKEN} at most"
    return None
