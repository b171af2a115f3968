"""Rounds rows to 8-bit floats (e4m3) with a scale for each row, or for each group of its inputs."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.activations import units_of
from pallas_kernels.packed_product.tuning import scaled_rows
from pallas_kernels.round_tokens.reference import GROUP, round_tokens_reference
from pallas_kernels.selection import Implementation, kernel_module

WIDTH_STEP = 256  # the kernel's row width is a multiple: two entries for each of 128 threads
GROUPED_STEP = 4 * GROUP  # with several groups: each of 4 warps has one
MAX_WIDTH = 16384  # widest row that fits the registers


@jax.named_scope("round_tokens")
def round_tokens(
    x: Array, num_groups: int = 1, implementation: Implementation = "reference"
) -> tuple[Array, Array]:
    """Divide each group of consecutive entries by a scale, so that its largest becomes 448.

    Args:
      x: [M, K]
      num_groups: of each row.
      implementation: see selection.Implementation; the Hopper kernel takes bfloat16, K up to
        16384: one group and a multiple of 256, or groups of 128 and a multiple of 512.

    Returns e4m3 [M, K], rounded to nearest, and float32 scales [num_groups, P]: P is M padded to a
    multiple of 32 (as packed_product takes them); the padding holds anything.
    """
    padded = scaled_rows(len(x))
    mosaic = kernel_module("round_tokens", implementation, misfit(x, num_groups))
    if mosaic is None:
        return round_tokens_reference(x, num_groups, padded)
    kernel = mosaic.round_tokens_mosaic if num_groups == 1 else mosaic.round_groups_mosaic
    return kernel(x, padded)


@jax.named_scope("round_tokens")
def round_gated(
    gate_up: Array, implementation: Implementation = "reference"
) -> tuple[Array, Array]:
    """Hidden units silu(gate) * up, rounded to 8-bit floats.

    Args:
      gate_up: [M, 2, F]
      implementation: see selection.Implementation; the Hopper kernel takes bfloat16, F a multiple
        of 256 up to 16384.

    Returns e4m3 [M, F] and float32 scales [1, P], as round_tokens of the units in gate_up's dtype.
    """
    problem = misfit(gate_up[:, 0], 1)
    mosaic = kernel_module("round_tokens", implementation, problem)
    if mosaic is None:
        return round_tokens(units_of(gate_up[:, 0], gate_up[:, 1], None, jax.nn.sigmoid))
    return mosaic.round_gated_mosaic(gate_up, scaled_rows(len(gate_up)))


def misfit(x: Array, num_groups: int) -> str | None:
    """Why the kernel cannot take these rows, None if it can."""
    width, step = x.shape[-1], WIDTH_STEP if num_groups == 1 else GROUPED_STEP
    if x.dtype != jnp.bfloat16 or (num_groups > 1 and width != num_groups * GROUP):
        return (
            f"{x.dtype} rows in {num_groups} groups: bfloat16 and one group, or groups of {GROUP}"
        )
    if width % step or width > MAX_WIDTH:
        return f"rows of {width}: a multiple of {step} up to {MAX_WIDTH}"
    return None
