"""Top-k, top-p and min-p truncation of a row of logits, as a threshold."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.selection import Implementation, kernel_module
from pallas_kernels.truncate.reference import truncation_threshold_reference

MAX_ENTRIES = 262_144  # in a row; tested up to this length


@jax.named_scope("truncate")
def truncation_threshold(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    implementation: Implementation = "reference",
) -> Array:
    """The smallest logit that top-k, then top-p, then min-p keep at a temperature.

    Logits below the threshold are hidden; equal logits are all kept or all hidden. The threshold is
    one of the raw logits, not divided by the temperature: another program might round the quotient
    differently. top-p is a share of the mass that top-k keeps; min-p is relative to the likeliest
    entry.

    Args:
      logits: float32 [B, N, V]. Entries of -inf have no mass. The result is unspecified for rows
        with NaN or +inf, and for rows of only -inf.
      temperature: float32 [B], above 0.
      top_k: int32 [B]; 0 keeps all.
      top_p: float32 [B], above 0; 1 keeps all.
      min_p: float32 [B], up to 1; 0 keeps all.
      implementation: "auto" takes the Hopper kernel where it fits (rows of 128 to 262,144 entries,
        a multiple of 128), else the reference. The two may round sums differently.

    Returns float32 [B, N]; -inf where everything is kept. The result of a row depends on that row
    and its parameters only.
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
    if size % 128 or not 128 <= size <= MAX_ENTRIES:
        return f"rows of {size}: they must be a multiple of 128, of at most {MAX_ENTRIES} entries"
    return None
