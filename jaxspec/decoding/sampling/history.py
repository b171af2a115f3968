"""What comes before the tokens that are sampled."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class History(NamedTuple):
    """The tokens before the one that is sampled at each of N nodes."""

    tokens: Array  # int32 [B, S]
    lens: Array  # int32 [B], how many of ``tokens`` are committed
    path: Array  # int32 [B, N, D], those after them from each node upwards, padded with -1

    @property
    def sizes(self) -> Array:
        """Number of tokens before each node's sample: int32 [B, N]."""
        return self.lens[:, None] + jnp.sum(self.path >= 0, axis=-1)
