"""Activations of 8-bit floats, for weights whose products take such."""

from typing import Any

from jax import Array

from jaxspec.models.linear import RoundedRows
from pallas_kernels.round_tokens import round_tokens
from pallas_kernels.selection import Kernels


def rounded_rows(x: Any, num_groups: int, kernels: Kernels) -> tuple[Array, Array]:
    """e4m3 rows [M, in] and their scales float32 [n, M or more] (see round_tokens).

    ``x``: [..., in], an array, or RoundedRows, which are rounded already.
    """
    if isinstance(x, RoundedRows):
        return x.values.reshape(-1, x.shape[-1]), x.scale
    rows = x.reshape(-1, x.shape[-1])
    return round_tokens(rows, num_groups, kernels.implementation("round_tokens"))
