"""The rest of a layer after its attention, in one launch: the output projection, the residual
stream and its norm, and an MLP with gates; all weights have 4 bits, or all are 8-bit floats."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8 import FLOAT8
from pallas_kernels.o_gate_up_down.plan import (
    BLOCK,
    GROUP,
    MOST_INPUTS,
    ROWS,
    TILE,
    splits_of,
)
from pallas_kernels.o_gate_up_down.reference import o_gate_up_down_reference
from pallas_kernels.o_gate_up_down.weights import LayerWeights, PackedWeights
from pallas_kernels.selection import Implementation, kernel_module

NORM_STEP = 1024  # entries of the residual stream that a warpgroup norms at a time


def o_gate_up_down(
    x: Array,
    residual: Array,
    weights: LayerWeights,
    eps: float,
    implementation: Implementation = "reference",
    meeting: Array | None = None,
) -> tuple[Array, Array]:
    """The residual stream before a layer's MLP, and what the MLP adds to it.

    Args:
      x: bfloat16 [M, A], the outputs of the attention.
      residual: bfloat16 [M, H], the residual stream before it.
      implementation: see selection.Implementation; the Hopper kernel takes what ``misfit`` says.
      meeting: a result of meeting.make_meeting, where thread blocks of the kernel meet. It must
        stay where it is while programs run, and be used by one program at a time. It is 0 again
        after each call. Without it the reference runs.

    Returns residual + the projection, [M, H], and float32 partial sums [S, M, H] of the MLP (see
    products.py). Gate, up and hidden units are rounded as results of products are.
    """
    problem = misfit(x, residual, weights) or (None if meeting is not None else "no place to meet")
    mosaic = kernel_module("o_gate_up_down", implementation, problem)
    if mosaic is None:
        return o_gate_up_down_reference(x, residual, weights, eps)
    return mosaic.o_gate_up_down_mosaic(x, residual, weights, meeting, eps)


def misfit(x: Array, residual: Array, weights: LayerWeights) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    problems = _problems(x, residual, weights)
    return ", ".join(problems) or None


def _problems_of_scales(products: Sequence[PackedWeights]) -> Iterator[str]:
    is_float8 = products[0].values.dtype == FLOAT8
    if is_float8 and all(len(packed.scale) == 1 for packed in products):
        return
    if any(packed.values.shape[1] != GROUP * len(packed.scale) for packed in products):
        yield f"groups of other than {GROUP} inputs"
    kinds = {(p.scale.dtype, p.zero is None) for p in products}
    if len(kinds) > 1 or (not is_float8 and products[0].scale.dtype.itemsize != 2):
        yield "scales that are not all of the same 16 bits, or zeros of some weights only"


def _problems(x: Array, residual: Array, weights: LayerWeights) -> Iterator[str]:
    norm, *products = weights
    (rows, inputs), hidden, units = x.shape, residual.shape[1], weights.down.values.shape[1]
    if rows > ROWS:
        yield f"{rows} rows: at most {ROWS}"
    if not x.dtype == residual.dtype == norm.dtype == jnp.bfloat16:
        kinds = f"{x.dtype} x, a residual stream of {residual.dtype} and a norm of {norm.dtype}"
        yield f"{kinds}: all must be bfloat16"
    dtype = weights.o.values.dtype
    if dtype not in (jnp.int4, FLOAT8) or any(p.values.dtype != dtype for p in products):
        yield "weights that are not all of 4 bits, or all 8-bit floats"
    shapes = [packed.values.shape for packed in products]
    if shapes != [(hidden, inputs), (2 * units, hidden), (hidden, units)]:
        yield f"weights {shapes} for {inputs} inputs and a residual stream of {hidden}"
        return
    yield from _problems_of_scales(products)
    if inputs % BLOCK or inputs > MOST_INPUTS:
        yield f"{inputs} inputs: a multiple of {BLOCK} up to {MOST_INPUTS}"
    if hidden % NORM_STEP or hidden > MOST_INPUTS:
        yield f"a residual stream of {hidden}: a multiple of {NORM_STEP} up to {MOST_INPUTS}"
    if units % TILE or splits_of(units) is None:
        yield f"{units} units: a multiple of {BLOCK} in few parts"
