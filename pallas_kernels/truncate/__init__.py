"""What top-k, top-p and min-p keep of a row of logits, as a threshold."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.selection import Implementation, kernel_module
from pallas_kernels.truncate.reference import truncation_threshold_reference

MOST_ENTRIES = 262_144  # of a row: eight blocks hold them in registers


@jax.named_scope("truncate")
def truncation_threshold(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    implementation: Implementation = "reference",
) -> Array:
    """The least of the logits that top-k, then top-p, then min-p keep at a temperature.

    Logits below it are hidden; equal ones are kept together. It is one of the logits themselves,
    not a quotient, which another program might round otherwise. top-p is a share of the mass that
    top-k keeps, min-p is relative to the likeliest entry.

    Args:
      logits: float32 [B, N, V]. Entries of -inf have no mass. What NaN, +inf and rows of nothing
        but -inf give is not said.
      temperature: float32 [B], above 0.
      top_k: int32 [B]; 0 keeps all.
      top_p: float32 [B], above 0; 1 keeps all.
      min_p: float32 [B], up to 1; 0 keeps all.
      implementation: "auto" takes the Hopper kernel where it fits (rows of 128 to 262,144 entries,
        a multiple of 128), else the reference. A sum's rounding differs between the two.

    Returns float32 [B, N]; -inf where everything is kept. A row's result is a function of that row
    and its parameters alone.

    Raises ValueError for arguments that the kernel cannot take when it is named.
    """
    mosaic = kernel_module("truncate", implementation, misfit(logits))
    if mosaic is None:
        return truncation_threshold_reference(logits, temperature, top_k, top_p, min_p)
    return mosaic.truncation_threshold_mosaic(logits, temperature, top_k, top_p, min_p)


def misfit(logits: Array) -> str | None:
    """Why the kernel cannot take these logits, None if it can."""
    size = logits.shape[-1]
    if logits.dtype != jnp.float32:
        return f"{logits.dtype} logits: they must be float32"
    if size % 128 or not 128 <= size <= MOST_ENTRIES:
        return f"rows of {size}: they must be a multiple of 128, of at most {MOST_ENTRIES} entries"
    return None
