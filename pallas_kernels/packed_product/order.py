"""The order in which weights of 4 bits are stored, so that each thread finds its own in one word.

Of a row of weights, tensor cores want certain inputs in each of four threads t (PTX ISA, wgmma,
the fragment of matrix A). A thread's word has its 8 weights of a span of 32 inputs, in an order in
which few instructions widen them:

- For rows of bfloat16 a thread has pairs of neighbors: inputs 2 t and 2 t + 1, and the same 8, 16
  and 24 further on. The weights of a pair are 16 bits from each other: place ``8 t + 4 e + j``
  holds input ``8 j + 2 t + e``.
- For rows of 8-bit floats it has four neighbors, 4 t to 4 t + 3, and the same 16 further on. The
  weights of four follow at 8 bits: place ``8 t + 2 i + h`` holds input ``16 h + 4 t + i``.

Weights of 8 bits that are widened for rows of bfloat16 have spans of 16, and words of two pairs, at
16 bits, too: place ``4 t + 2 e + j`` holds input ``8 j + 2 t + e``.
"""

import functools

import jax
from jax import Array

SPAN = 32
# By the bits of x and of weights: j, t, e; or h, t, i.
_SIZES = {(16, 4): (4, 4, 2), (8, 4): (2, 4, 4), (16, 8): (2, 4, 2)}


# jit: outside of a program each is one, instead of one for each step.
@functools.partial(jax.jit, static_argnames=("bits", "weight_bits"))
def kernel_order(x: Array, bits: int = 16, weight_bits: int = 4) -> Array:
    """x [..., K] in input order, K a multiple of SPAN, in the kernel's order.

    ``bits``: of the rows that the kernel multiplies: 16, or 8. ``weight_bits``: likewise 4, or 8.
    """
    spans = x.reshape(*x.shape[:-1], -1, *_SIZES[bits, weight_bits])
    return _last_axes(spans, (1, 2, 0)).reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("bits", "weight_bits"))
def input_order(x: Array, bits: int = 16, weight_bits: int = 4) -> Array:
    """The inverse of ``kernel_order``."""
    first, threads, last = _SIZES[bits, weight_bits]
    spans = x.reshape(*x.shape[:-1], -1, threads, last, first)
    return _last_axes(spans, (2, 0, 1)).reshape(x.shape)


def _last_axes(x: Array, order: tuple[int, int, int]) -> Array:
    """x with its last three axes in another order."""
    first = x.ndim - 3
    return x.transpose(*range(first), *(first + axis for axis in order))
