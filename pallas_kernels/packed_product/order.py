"""The order in which weights of 4 bits are stored, so that each thread finds its own in one word.

Of each 16 inputs of a row of weights, tensor cores want two pairs of neighbors in each of four
threads: inputs 2 t and 2 t + 1 in thread t, and those 8 further on (PTX ISA, wgmma, the fragment of
matrix A). A word of 8 weights gives four pairs with few instructions if the weights of a pair are
16 bits apart. So within a span of 32 inputs, thread t's word has the first weights of its four
pairs, then the second ones: place ``8 t + 4 e + j`` holds input ``8 j + 2 t + e``.
"""

from jax import Array

SPAN = 32


def kernel_order(x: Array) -> Array:
    """x [..., K] in input order, K a multiple of SPAN, in the kernel's order."""
    spans = x.reshape(*x.shape[:-1], -1, 4, 4, 2)  # j, t, e
    return _last_axes(spans, (1, 2, 0)).reshape(x.shape)


def input_order(x: Array) -> Array:
    """The inverse of ``kernel_order``."""
    spans = x.reshape(*x.shape[:-1], -1, 4, 2, 4)  # t, e, j
    return _last_axes(spans, (2, 0, 1)).reshape(x.shape)


def _last_axes(x: Array, order: tuple[int, int, int]) -> Array:
    """x with its last three axes in another order."""
    first = x.ndim - 3
    return x.transpose(*range(first), *(first + axis for axis in order))
