"""Outputs of a gated delta rule, normed by heads, times SiLU of their gates."""

import jax
from jax import Array

from pallas_kernels.gated_norm.reference import gated_norm_reference
from pallas_kernels.packed_product.tuning import scaled_rows
from pallas_kernels.round_tokens import round_tokens
from pallas_kernels.selection import Implementation, kernel_module

__all__ = ["gated_norm", "gated_norm_rounded", "misfit"]

HEAD_DIM = 128  # entries of a head: a thread of a warpgroup has one
MAX_ROWS = 512  # for the rows of prompts few launches save nothing


@jax.named_scope("gated_norm")
def gated_norm(
    x: Array, projected: Array, norm: Array, eps: float, implementation: Implementation
) -> Array:
    """x over the root of the mean of its squares, times norm and SiLU of the gates.

    Args:
      x: float32 [M, G, r, D], outputs of r heads in each of G groups.
      projected: [M, G, w]; the gates are the last r D entries of each group.
      norm: float32 [D].
      eps: added to the mean.
      implementation: see selection.Implementation; ``misfit`` says what the Hopper kernel takes.

    Returns [M, G * r * D] in the dtype of ``projected``.
    """
    mosaic = kernel_module("gated_norm", implementation, misfit(x, projected))
    if mosaic is None:
        return gated_norm_reference(x, projected, norm, eps)
    return mosaic.gated_norm_mosaic(x, projected, norm, eps)


@jax.named_scope("gated_norm")
def gated_norm_rounded(
    x: Array, projected: Array, norm: Array, eps: float, implementation: Implementation
) -> tuple[Array, Array]:
    """``round_tokens`` of ``gated_norm``, with a scale for each head: e4m3 [M, G * r * D] and
    float32 scales [G * r, P]."""
    mosaic = kernel_module("gated_norm", implementation, misfit(x, projected))
    if mosaic is None:
        normed = gated_norm_reference(x, projected, norm, eps)
        return round_tokens(normed, x.shape[1] * x.shape[2])
    return mosaic.gated_norm_rounded_mosaic(x, projected, norm, eps, scaled_rows(len(x)))


def misfit(x: Array, projected: Array) -> str | None:
    """Why the kernel cannot take these outputs, None if it can."""
    if x.dtype != "float32" or projected.dtype != "bfloat16" or x.shape[-1] != HEAD_DIM:
        return (
            f"{x.dtype} heads of {x.shape[-1]} with {projected.dtype} gates: float32 heads of "
            f"{HEAD_DIM} with bfloat16 ones"
        )
    if len(x) > MAX_ROWS:
        return f"{len(x)} rows: at most {MAX_ROWS}"
    return None
