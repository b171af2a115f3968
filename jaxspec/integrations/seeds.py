"""Seeds of the rows of a trainer's calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def seeds_of_call(seed: Any, call: int, rows: int) -> list[int]:
    """A seed for each row, no two alike; the same for the same arguments, others in each call.

    Args:
      seed: an integer, or a jax key, typed or as an array of integers.
      call: the number of the call.
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).astype(np.uint32).ravel().tolist()
    first = np.random.SeedSequence(words, spawn_key=(call,)).generate_state(1)[0]
    return [(int(first) + row) % 2**32 for row in range(rows)]
