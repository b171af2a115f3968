"""The order in which numbers of 4 or 8 bits are stored, and their bits, for the kernel.

Of a row of weights, tensor cores want certain inputs in each of four threads t (PTX ISA, wgmma, the
fragment of matrix A): pairs of neighbors, inputs 2 t and 2 t + 1, and the same 8 further on. A
thread finds its numbers of 16 bytes of a row in one word: 8 of 4 bits, or 4 of 8.

- The numbers of a span are in the order of pallas_kernels/packed_product/order.py: pairs are 16
  bits further on in the word.
- The bits of a word of floats are then moved to where few instructions bring each pair's to the
  bits that they have in two numbers of bfloat16 (see widening.py), or to the same ones rotated. The
  bits of e2m1 are there the sign, bit 15, and 8 to 6, those of e4m3 bits 15 and 10 to 4.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.packed_product.order import input_order, kernel_order

WORD = 4  # bytes

# Where the bits of a word of floats go to, by pair, for its low number; its high number's are 16
# further on, modulo 32.
_PLACES = {
    "e2m1": ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15)),
    "e4m3": ((0, 1, 2, 3, 4, 5, 6, 11), (12, 13, 14, 7, 8, 9, 10, 15)),
}


def _bit_places(code: str) -> list[tuple[int, int]]:
    """Each bit of a word in kernel order: where it is, and where it goes to."""
    pairs = _PLACES[code]
    bits = 32 // (2 * len(pairs))
    return [
        (16 * e + bits * j + i, (place + 16 * e) % 32)
        for j, places in enumerate(pairs)
        for i, place in enumerate(places)
        for e in range(2)
    ]


# jit: outside of a program each is one, instead of one for each step.
@functools.partial(jax.jit, static_argnames="code")
def stored_order(values: Array, code: str) -> Array:
    """Bytes uint8 [..., n] of numbers in input order, n a multiple of 16, as they are stored."""
    if code == "e4m3":
        ordered = kernel_order(values, 16, 8)
    else:
        halves = jnp.stack([values & 15, values >> 4], axis=-1)
        fields = kernel_order(halves.reshape(*values.shape[:-1], -1))
        ordered = fields[..., ::2] | fields[..., 1::2] << 4
    return ordered if code == "int4" else _moved(ordered, _bit_places(code))


@functools.partial(jax.jit, static_argnames="code")
def file_order(values: Array, code: str) -> Array:
    """The inverse of ``stored_order``."""
    if code != "int4":
        values = _moved(values, [(to, place) for place, to in _bit_places(code)])
    if code == "e4m3":
        return input_order(values, 16, 8)
    halves = jnp.stack([values & 15, values >> 4], axis=-1)
    fields = input_order(halves.reshape(*values.shape[:-1], -1))
    return fields[..., ::2] | fields[..., 1::2] << 4


def _moved(values: Array, places: list[tuple[int, int]]) -> Array:
    """Bytes whose words' bits are moved: from, and to."""
    words = lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, WORD), jnp.uint32)
    by_distance: dict[int, int] = {}
    for place, to in places:
        by_distance[to - place] = by_distance.get(to - place, 0) | 1 << place
    moved = jnp.zeros_like(words)
    for distance, mask in by_distance.items():
        bits = words & jnp.uint32(mask)
        moved |= bits << distance if distance >= 0 else bits >> -distance
    return lax.bitcast_convert_type(moved, jnp.uint8).reshape(values.shape)
