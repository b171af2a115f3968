"""Seeds of the rows of a trainer's calls."""

from typing import Any

import jax
import numpy as np

from jaxspec.decoding.seeds import group_seeds


def seeds_of_call(seed: Any, call: int, rows: int) -> list[int]:
    """A seed for each row, no two alike; the same for the same arguments, others in each call.

    Args:
      seed: an integer, or a jax key, typed or as an array of two integers.
      call: the number of the call.
    """
    if np.shape(seed) == (2,):
        seed = jax.random.wrap_key_data(seed)
    return np.asarray(group_seeds(seed, [0], rows, epoch=call))[0].tolist()
