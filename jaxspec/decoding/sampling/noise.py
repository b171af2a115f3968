"""Random numbers that are a function of (seed, stream, position, id) only.

Each number is one Threefry-2x32 block (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011). It is the same for any batch row, tree node or vocabulary shard that computes it.
"""

import enum

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_BELOW_ONE = np.float32(1 - 2**-24)


class Stream(enum.IntEnum):
    """Independent random streams of one request."""

    TARGET = 0  # the target's tokens; shared by coupled drafters
    DRAFT = 1  # tokens drawn from a drafter's distribution
    ACCEPT = 2  # accept-or-reject trials of rejection sampling
    RESIDUAL = 3  # the token drawn after the last rejection


def uniform(seeds: Array, stream: Stream, positions: Array, ids: Array) -> Array:
    """Uniform float32 in (0, 1): seeds [B], positions [B, N], ids [I] or [B, N, I] -> [B, N, I]."""
    bits = threefry(seeds[:, None, None], stream, positions[..., None], ids)
    # The largest words would round up to 1, which log1p and accept-or-reject trials must not get.
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), _BELOW_ONE)


def gumbel(seeds: Array, stream: Stream, positions: Array, token_ids: Array) -> Array:
    """Gumbel noise of tokens at absolute positions; shapes as in ``uniform``.

    The large values that decide an argmax come from uniforms near 0, where float32 is most precise.
    """
    return -jnp.log(-jnp.log1p(-uniform(seeds, stream, positions, token_ids)))


def threefry(key: ArrayLike, other_key: ArrayLike, word: ArrayLike, other_word: ArrayLike) -> Array:
    """First word of the Threefry block (word, other_word) under a key of two words; uint32.

    Arguments are broadcast. jax.random is not used: its generator is a loop on CPUs and a separate
    call on GPUs, and neither fuses with the code that reads the numbers.
    """
    first, second, x, y = (jnp.asarray(w, jnp.uint32) for w in (key, other_key, word, other_word))
    keys = (first, second, first ^ second ^ _PARITY)
    x, y = x + first, y + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return x
