"""Rows of tables of n-grams, by hashes of token ids.

A hash is the xor of products of ids and multipliers of 63 bits, and a head's row its remainder by
the head's size. Devices compute in words of 32 bits here: products and remainders are put together
of parts that fit.
"""

from itertools import accumulate

import jax.numpy as jnp
from jax import Array

from jaxspec.config.ngrams import NgramConfig

_HALF = 0xFFFF


def rows_of_ngrams(texts: Array, config: NgramConfig) -> Array:
    """The row of each head: int32 [B, T, heads].

    texts: int32 [B, T, n], tokens with those before them, the oldest first, each plus 1; 0 before a
    text begins.
    """
    tokens, ended = [texts[..., -1] - 1], jnp.zeros(texts.shape[:-1], bool)
    for place in range(2, config.tokens + 1):
        token = texts[..., -place] - 1
        ended = ended | (token == config.end) | (token < 0)
        tokens.append(jnp.where(ended, config.end, token))
    products = [
        _product(token.astype(jnp.uint32), factor)
        for token, factor in zip(tokens, config.multipliers, strict=True)
    ]
    starts = [0, *accumulate(config.sizes)][:-1]
    high, low = products[0]
    rows = list[Array]()
    for place, (next_high, next_low) in enumerate(products[1:]):
        high, low = high ^ next_high, low ^ next_low
        heads = slice(place * config.heads, (place + 1) * config.heads)
        sizes = jnp.array(config.sizes[heads], jnp.uint32)
        found = _remainder(high[..., None], low[..., None], sizes, max(config.sizes[heads]))
        rows.append(found.astype(jnp.int32) + jnp.array(starts[heads], jnp.int32))
    return jnp.concatenate(rows, axis=-1)


def _product(x: Array, factor: int) -> tuple[Array, Array]:
    """The high and the low word of x times a factor, of words uint32; without what is past 64
    bits."""
    low_factor, high_factor = factor & 0xFFFFFFFF, factor >> 32
    x_low, x_high = x & _HALF, x >> 16
    f_low, f_high = jnp.uint32(low_factor & _HALF), jnp.uint32(low_factor >> 16)
    lowest, middle, other = x_low * f_low, x_high * f_low, x_low * f_high
    carried = (lowest >> 16) + (middle & _HALF) + (other & _HALF)
    low = (carried << 16) | (lowest & _HALF)
    high = x_high * f_high + (middle >> 16) + (other >> 16) + (carried >> 16)
    return high + x * jnp.uint32(high_factor), low


def _remainder(high: Array, low: Array, sizes: Array, largest: int) -> Array:
    """Remainders uint32 of numbers of two words by sizes, the largest of which is given: a few bits
    after the other, so that none is longer than a word."""
    width = 32 - largest.bit_length()
    rest, left = high % sizes, 32
    while left:
        taken = min(width, left)
        left -= taken
        part = (low >> left) & jnp.uint32((1 << taken) - 1)
        rest = ((rest << taken) | part) % sizes
    return rest
