"""Norms for projections that round what they read to 8-bit floats: one launch does both."""

from collections.abc import Callable
from typing import Any

from jax import Array

from jaxspec.models.linear import AnyLinear, RoundedRows
from jaxspec.parallel.pytree import Pytree, pytree
from pallas_kernels.add_rms_norm import (
    add_rms_norm,
    add_rms_norm_grouped,
    add_rms_norm_rounded,
    misfit_of_groups,
)
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.round_tokens.reference import GROUP
from pallas_kernels.selection import Implementation


@pytree
class OneReader(Pytree):
    """One of several readers of the same rows, the only one of them that rounds: others read the
    rows as they are."""

    linear: AnyLinear


def plain_rows(x: Any) -> Array:
    """What OneReader and others read, as others do: of an array, or of RoundedRows that have it."""
    if not isinstance(x, RoundedRows):
        return x
    assert x.plain is not None, "rows that others read, too"
    return x.plain


def norm_for(
    reader: AnyLinear | OneReader | None,
    rounds: Callable[[AnyLinear | None, int], bool],
    x: Array,
    partials: Array | ChosenProducts,
    weight: Array,
    eps: float,
    implementation: Implementation,
) -> tuple[Array, Any]:
    """(x + partials, its norm): see add_rms_norm. The norm is RoundedRows if ``reader`` reads them
    and ``rounds``, which says whether the kernel makes them for a reader of so many groups."""
    rows = x, partials, weight, eps, implementation
    alone = not isinstance(reader, OneReader)
    rounding = reader.linear if isinstance(reader, OneReader) else reader
    if alone and rounds(rounding, 1):
        total, values, scale = add_rms_norm_rounded(*rows)
        return total, RoundedRows(values=values, scale=scale, dtype=x.dtype)
    if not misfit_of_groups(x, weight) and rounds(rounding, x.shape[-1] // GROUP):
        total, plain, values, scale = add_rms_norm_grouped(*rows)
        plain = None if alone else plain
        return total, RoundedRows(values=values, scale=scale, plain=plain, dtype=x.dtype)
    return add_rms_norm(*rows)
