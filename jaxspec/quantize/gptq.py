"""GPTQ: weights are rounded column by column, and later ones make up for the error of earlier ones.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, arXiv 2210.17323. For outputs W x the change caused by
rounding is quadratic in the weights, with the Hessian H = sum of x xᵀ for every row of W. With U
the upper Cholesky factor of H's inverse, rounding column i with error e = (w_i - q_i) / U_ii is
best made up for by subtracting e U_ij from each later column j.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.quantize.compiled import program
from jaxspec.quantize.rounding import Grid, Rounded, by_group, fit, nearest, rounded

Order = Literal["inputs", "static", "mixed"]
BLOCK = 128  # columns whose errors are spread together


@dataclasses.dataclass(frozen=True)
class GptqConfig:
    """How to round.

    Attributes:
      order: of the columns. ``inputs``: as they are. ``static``: by falling diag(H), "act-order";
        scales are those of the original groups of inputs. ``mixed``: by falling diag(H), and
        groups are of inputs that follow each other in this order, so that files need an index.
      damping: share of the mean of diag(H) that is added to it.
    """

    order: Order = "static"
    damping: float = 0.01

    def __post_init__(self):
        if not 0 < self.damping < 1:
            raise ValueError(f"the damping must be between 0 and 1, got {self.damping}")


def gptq(weights: Sequence[Array], hessian: Array, grid: Grid, config: GptqConfig) -> list[Rounded]:
    """Quantize weights [out, in], each, whose common inputs have the Hessian [in, in].

    Inputs that are always 0 are rounded to nearest. Where ``damping`` does not suffice for a
    Cholesky factor, ten times as much is taken.

    Raises ValueError for a Hessian that has none.
    """
    damping = config.damping
    while damping <= 1:
        order, factor, is_finite = _ordered_factor(hessian, damping, config.order)
        if is_finite:
            return _round_together(weights, order, factor, grid, config.order)
        damping *= 10
    raise ValueError("calibration gave inputs that are not finite, or far too large")


@functools.partial(program, static_argnames=("kind",))
def _ordered_factor(
    hessian: Array, damping: Array | float, kind: Order
) -> tuple[Array, Array, Array]:
    """The order of the columns, int [in], its Cholesky factor, and whether that is finite."""
    order = jnp.arange(len(hessian))
    if kind != "inputs":
        order = jnp.argsort(-jnp.diag(hessian), stable=True)
    factor = inverse_factor(hessian[order][:, order], damping)
    return order, factor, jnp.isfinite(factor).all()


@functools.partial(program, static_argnames=("grid", "kind"))
def _round_together(
    weights: Sequence[Array], order: Array, factor: Array, grid: Grid, kind: Order
) -> list[Rounded]:
    """See round_columns. Rows do not depend on each other, so those of all weights go through the
    columns together."""
    together = jnp.concatenate([weight.astype(jnp.float32) for weight in weights])
    found, parts, start = round_columns(together, order, factor, grid, kind), list[Rounded](), 0
    for weight in weights:
        parts.append(found.rows(start, start + len(weight)))
        start += len(weight)
    return parts


def inverse_factor(hessian: Array, damping: Array | float) -> Array:
    """Upper triangular U [in, in] with UᵀU = H⁻¹, where H is ``hessian`` damped; NaN if H is not
    positive definite.

    With J the reversal, J H J = L Lᵀ makes H = R Rᵀ for the upper triangular R = J L J, so U = R⁻¹:
    one factorization, and no inverse of H.
    """
    diagonal = jnp.diag(hessian)
    diagonal = jnp.where(diagonal > 0, diagonal, 1.0)
    damped = diagonal + damping * jnp.mean(diagonal)
    hessian = jnp.where(jnp.eye(len(hessian), dtype=bool), damped, hessian)
    reverse = jnp.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
    identity = jnp.eye(len(hessian), dtype=hessian.dtype)
    return jax.scipy.linalg.solve_triangular(reverse, identity, lower=False)


def round_columns(weight: Array, order: Array, factor: Array, grid: Grid, kind: Order) -> Rounded:
    """Round the columns of float32 weights [out, in] in the given order, int [in]; ``factor``
    belongs to inputs in this order."""
    size = weight.shape[1]
    groups = grid.num_groups(size)
    block = math.gcd(size, BLOCK) if kind == "static" or groups == 1 else size // groups
    scale, zero = fit(by_group(weight, grid), grid)  # [out, n]
    moves = kind != "static" and groups > 1  # scales are fitted when a group's turn has come
    group_of = order // (size // groups) if kind == "static" else jnp.arange(size) * groups // size

    def round_block(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        columns, values, scale, zero = carry
        start = index * block
        weights = lax.dynamic_slice_in_dim(columns, start, block, 1)
        if moves:
            fitted = fit(weights, grid)
            scale, zero = (
                lax.dynamic_update_slice_in_dim(whole, part[:, None], index, 1)
                for whole, part in zip((scale, zero), fitted, strict=True)
            )
        members = lax.dynamic_slice_in_dim(group_of, start, block)
        rows = lax.dynamic_slice_in_dim(factor, start, block, 0)  # [block, in]
        square = lax.dynamic_slice_in_dim(rows, start, block, 1)
        chosen, errors = _round_block(weights, square, scale[:, members], zero[:, members], grid)
        values = lax.dynamic_update_slice_in_dim(values, chosen, start, 1)
        later = jnp.where(jnp.arange(size) >= start + block, rows, 0.0)
        columns = columns - jnp.matmul(errors, later, precision="highest")
        return columns, values, scale, zero

    start = (weight[:, order], jnp.zeros_like(weight), scale, zero)
    _, values, scale, zero = lax.fori_loop(0, size // block, round_block, start)
    back = jnp.argsort(order)
    mixed = group_of[back].astype(jnp.int32) if kind == "mixed" and groups > 1 else None
    return rounded(values[:, back], scale, zero, mixed, grid)


def _round_block(
    columns: Array, factor: Array, scale: Array, zero: Array, grid: Grid
) -> tuple[Array, Array]:
    """Values of columns [out, block], and the errors (w - q) / U_ii to be spread to later blocks;
    ``scale`` and ``zero`` are those of each column."""
    diagonal, spread = jnp.diag(factor), jnp.triu(factor, 1)

    def values_and_errors(
        columns: Array, scale: Array, zero: Array, diagonal: Array
    ) -> tuple[Array, Array]:
        values = nearest(columns, scale, zero, grid)
        return values, (columns - (values - zero) * scale) / diagonal

    def round_one(i: Array, columns: Array) -> Array:
        _, error = values_and_errors(columns[:, i], scale[:, i], zero[:, i], diagonal[i])
        return columns - error[:, None] * spread[i]

    # The loop is the longest chain of small steps there is, so it keeps the columns only. What a
    # column was rounded to follows from how its own step found it: no later step changes it.
    columns = lax.fori_loop(0, len(factor), round_one, columns)
    return values_and_errors(columns, scale, zero, diagonal)
