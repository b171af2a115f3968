"""Random numbers that are a function of (seed, stream, position, id), and of nothing else.

One Threefry-2x32 block (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
for each, so the number is the same whoever asks: another batch row, tree node or vocabulary shard.
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
    DRAFT = 1  # tokens drawn from a drafter's own distribution
    ACCEPT = 2  # accept-or-refuse trials of rejection sampling
    RESIDUAL = 3  # the token drawn after the last refusal


def uniform(seeds: Array, stream: Stream, positions: Array, ids: Array) -> Array:
    """Uniform float32 in (0, 1): seeds [B], positions [B, N], ids [I] or [B, N, I] -> [B, N, I]."""
    bits = threefry(seeds[:, None, None], stream, positions[..., None], ids)
    # The largest words round up to 1, which log1p and accept-or-refuse trials must not see.
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), _BELOW_ONE)


def gumbel(seeds: Array, stream: Stream, positions: Array, token_ids: Array) -> Array:
    """Gumbel noise of tokens at absolute positions; shapes as in ``uniform``.

    The tail that decides an argmax comes from uniforms near 0, where float32 is finest.
    """
    return -jnp.log(-jnp.log1p(-uniform(seeds, stream, positions, token_ids)))


def threefry(key: ArrayLike, other_key: ArrayLike, word: ArrayLike, other_word: ArrayLike) -> Array:
    """First word of the block (word, other_word) under a key of two words; uint32, broadcast.

    Written out instead of taken from jax.random, whose generator is a loop on CPUs and a call of
    its own on GPUs: neither fuses with what reads the numbers.
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
